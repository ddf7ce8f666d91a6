"""SWE-ReX as it ships: its server runs in the sandbox, its own client talks HTTP to it.

A sandbox of ours has no network, so this one is started with the host's; the loopback costs
a request some tens of microseconds, far below what is measured here.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import socket
from typing import Any

from benchmarks.sandbox.guests import GUEST_FOLDER
from benchmarks.sandbox.stage import START_SECONDS, Stage, WayLacking
from benchmarks.sandbox.ways import CALL_SECONDS, WayBroken
from sandboxes.runtime.argv import SANDBOX_ENV
from sandboxes.runtime.protocol import SandboxHandle


class SwerexWay:
    """Keep one bash session of a SWE-ReX server that runs in a guest sandbox."""

    def __init__(self, stage: Stage, guest: SandboxHandle) -> None:
        self._messages, remote = import_client()
        token, port = secrets.token_hex(16), _free_port()
        self._stage = stage
        self._process = stage.spawn(
            [
                *stage.entry(guest.pid, network="host"),
                *("python3", "-m", "swerex.server", "--host", "127.0.0.1"),
                *("--port", str(port), "--auth-token", token),
            ],
            env=SANDBOX_ENV | {"PYTHONPATH": GUEST_FOLDER},
        )
        self._runner = asyncio.Runner()
        self._client = remote.RemoteRuntime(
            host="http://127.0.0.1", port=port, auth_token=token, timeout=CALL_SECONDS
        )
        try:
            self._runner.run(self._client.wait_until_alive(timeout=START_SECONDS))
            request = self._messages.CreateBashSessionRequest(startup_timeout=10)
            self._runner.run(self._client.create_session(request))
        except BaseException:
            self.close()
            raise

    def run(self, command: str) -> str:
        """Run a command; see `Way.run`."""
        action = self._messages.BashAction(command=command, timeout=CALL_SECONDS)
        answer = self._runner.run(self._client.run_in_session(action))
        if answer.exit_code != 0:
            raise WayBroken(f"SWE-ReX reported {answer.exit_code}: {command}")
        return str(answer.output)

    def close(self) -> None:
        """End the server."""
        self._runner.close()
        self._stage.end(self._process)


def import_client() -> tuple[Any, Any]:
    """Return SWE-ReX's modules of messages and of its client; raises WayLacking."""
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "ERROR")  # the client's log, here
    try:
        # Not a plain import: only requirements-bench.txt brings it.
        messages = importlib.import_module("swerex.runtime.abstract")
        remote = importlib.import_module("swerex.runtime.remote")
    except ImportError as fault:
        raise WayLacking(f"{fault}: install requirements-bench.txt") from None
    return messages, remote


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
