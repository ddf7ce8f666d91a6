"""Real engines for the tests: one PostgreSQL and one Valkey for the whole run.

Loaded with `-p tests.engines`, so that they run before Django's settings are read.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_site.stack.engines import Engines, write_env_file

_ENGINES: Engines | None = None


def _start_engines() -> None:
    """Start the engines before Django's settings are read, unless the environment names some."""
    global _ENGINES
    if os.environ.get("DATABASE_URL") and os.environ.get("BROKER_URL"):
        os.environ.setdefault("PRORL_SECRET_KEY", "for-tests-only")
        return
    folder = Path(tempfile.mkdtemp(prefix="prorl-tests-"))
    folder.chmod(0o755)
    (folder / "static").mkdir()
    _ENGINES = Engines(folder)
    _ENGINES.start()
    write_env_file(
        folder / "stack.env",
        {"DATABASE_URL": _ENGINES.database_url(), "BROKER_URL": _ENGINES.broker_url},
    )
    os.environ["PRORL_VAR"] = str(folder)


_start_engines()


@pytest.fixture(scope="session")
def engines() -> Engines:
    """Return the engines of this run; fails when the environment names others."""
    if _ENGINES is None:
        pytest.fail("this test starts and stops engines: unset DATABASE_URL and BROKER_URL")
    return _ENGINES


@pytest.fixture(scope="session", autouse=True)
def _stop_engines() -> Iterator[None]:
    yield
    if _ENGINES is not None:
        from django.db import connections

        connections.close_all()
        _ENGINES.stop()
        shutil.rmtree(_ENGINES.var_dir, ignore_errors=True)
