"""The scripted shell of the runtime in memory."""

# ruff: noqa: ARG002 - the protocol's arguments, most of which a script ignores

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, CommandResult, ShellState

if TYPE_CHECKING:
    from sandboxes.runtime.fake import FakeRuntime


class FakeShell:
    """Pass commands to the runtime's script; see `ShellSession`."""

    def __init__(self, runtime: FakeRuntime, handle: SandboxHandle) -> None:
        self._runtime = runtime
        self._handle = handle
        self._state = ShellState(cwd=runtime.sandboxes[handle.name].cwd, exports="")
        self._running = False

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        interactive: bool = False,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Run a command through the script; an answer with `running` leaves it open to `send`."""
        if cancelled is not None and cancelled():
            return CommandResult(
                output="", exit_code=None, cwd=self._state.cwd, duration_seconds=0.0, cancelled=True
            )
        result = self._runtime.run_command(self._handle, command, output_bytes)
        self._state = replace(self._state, cwd=result.cwd)
        self._running = result.running
        return result

    def send(
        self,
        text: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Pass what is typed to the script, as if it were a command."""
        if not self._running:
            return CommandResult(
                output="nothing is running that could read this",
                exit_code=126,
                cwd=self._state.cwd,
                duration_seconds=0.0,
            )
        return self.run(
            text,
            timeout_seconds=timeout_seconds,
            output_bytes=output_bytes,
            cancelled=cancelled,
        )

    def state(self) -> ShellState:
        """Return the directory after the last command."""
        return self._state

    def restore(self, state: ShellState) -> None:
        """Take over a directory."""
        self._state = state
        self._runtime.sandboxes[self._handle.name].cwd = state.cwd

    def close(self) -> None:
        """Do nothing."""
