"""Our own runtime: a shell on a terminal, a shell on pipes, one program per command."""

from __future__ import annotations

from benchmarks.sandbox.stage import Stage
from benchmarks.sandbox.ways import CALL_SECONDS, OUTPUT_BYTES
from sandboxes.runtime.protocol import SandboxHandle


class ShellWay:
    """Keep one shell of the runtime open, as the shell tool does."""

    def __init__(self, stage: Stage, handle: SandboxHandle, *, terminal: bool) -> None:
        self._shell = stage.runtime.open_shell(handle, terminal=terminal)

    def run(self, command: str) -> str:
        """Run a command; see `Way.run`."""
        return self._shell.run(
            command, timeout_seconds=CALL_SECONDS, output_bytes=OUTPUT_BYTES
        ).output

    def close(self) -> None:
        """End the shell."""
        self._shell.close()


class ExecWay:
    """Start one program per command through the runtime."""

    def __init__(self, stage: Stage, handle: SandboxHandle) -> None:
        self._runtime = stage.runtime
        self._handle = handle

    def run(self, command: str) -> bytes:
        """Run a command; see `Way.run`."""
        return self._runtime.exec(
            self._handle,
            ["bash", "-c", command],
            timeout_seconds=CALL_SECONDS,
            output_bytes=OUTPUT_BYTES,
        ).stdout

    def close(self) -> None:
        """Do nothing: nothing is kept."""
