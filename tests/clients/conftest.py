"""A scripted service and clients of it; nothing here needs the service's own packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prorl_client import Client, RetryPolicy

from tests.clients.scripted import Scripted, scripted_service

QUICK = RetryPolicy(total_seconds=30.0, first_seconds=0.01, longest_seconds=0.05)
PLAIN = {"verify": False}  # no certificates are read for plain HTTP


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration out of the tests."""
    for name in ("PRORL_URL", "PRORL_TOKEN", "PRORL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRORL_CONFIG", str(tmp_path / "no-config.ini"))


@pytest.fixture
def service() -> Iterator[Scripted]:
    with scripted_service() as script:
        yield script


@pytest.fixture
def client(service: Scripted) -> Iterator[Client]:
    with Client(service.url, "secret", retries=QUICK, http_options=PLAIN) as client:
        yield client
