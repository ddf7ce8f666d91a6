"""A bash at the end of two pipes, the limit of what is possible; and `apptainer exec`."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from benchmarks.sandbox.stage import Stage
from benchmarks.sandbox.ways import CALL_SECONDS, WayBroken
from sandboxes.runtime.argv import SANDBOX_ENV, engine_env, engine_exec_argv
from sandboxes.runtime.protocol import SandboxHandle

_CHUNK = 1024 * 1024


class PipeWay:
    """Write commands into a bash and read until a line of ours comes back; no safety at all."""

    def __init__(
        self, stage: Stage, entry: Sequence[str], env: Mapping[str, str] = SANDBOX_ENV
    ) -> None:
        self._stage = stage
        self._process = stage.spawn(
            [*entry, "/bin/bash", "--noprofile", "--norc"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._poller = select.poll()
        self._poller.register(self._out, select.POLLIN | select.POLLHUP)

    def run(self, command: str) -> bytes:
        """Run a command; see `Way.run`."""
        token = secrets.token_hex(8).encode()
        mark = b"\x1e" + token + b"\x1e"
        line = command.encode() + b"\nprintf '\\036%s\\036' " + token + b"\n"
        with suppress(BrokenPipeError):  # the read below tells why
            os.write(self._in, line)
        deadline = time.monotonic() + CALL_SECONDS
        parts: list[bytes] = []
        tail = b""
        while not tail.endswith(mark):
            if not self._poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise WayBroken(f"no answer within {CALL_SECONDS:g} s: {command}")
            data = os.read(self._out, _CHUNK)
            if not data:
                raise WayBroken(f"the shell ended: {(b''.join(parts))[-500:]!r}")
            parts.append(data)
            tail = (tail + data)[-len(mark) :]
        return b"".join(parts)[: -len(mark)]

    def close(self) -> None:
        """End the shell."""
        self._stage.end(self._process)


class EngineExecWay:
    """Call `apptainer exec instance://NAME` once per command."""

    def __init__(self, stage: Stage, handle: SandboxHandle) -> None:
        self._stage = stage
        self._argv = engine_exec_argv(stage.tools, name=handle.name, env=SANDBOX_ENV)
        self._env = engine_env(stage.root)

    def run(self, command: str) -> bytes:
        """Run a command; see `Way.run`."""
        process = self._stage.spawn(
            [*self._argv, "/bin/bash", "-c", command], env=self._env, stdout=subprocess.PIPE
        )
        try:
            output, _ = process.communicate(timeout=CALL_SECONDS)
        except BaseException:
            self._stage.end(process)
            raise
        if process.returncode != 0:
            raise WayBroken(f"apptainer exec ended with {process.returncode}: {command}")
        return output

    def close(self) -> None:
        """Do nothing: nothing is kept."""
