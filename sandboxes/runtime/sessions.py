"""What stays open in a sandbox over many calls: a shell, a Python interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

Cancelled = Callable[[], bool]

DEFAULT_OUTPUT_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Hold what one shell command left; terminal escapes are gone from `output`.

    `exit_code` is None when the command was interrupted or still runs. `shell_restarted`
    says that the shell ended, and a new one in its old state (see `ShellState`) took its
    place; background jobs are lost. `idle` says that it was silent for `idle_seconds`;
    `running` that it still runs and waits for `send`.
    """

    output: str
    exit_code: int | None
    cwd: str
    duration_seconds: float
    truncated: bool = False
    timed_out: bool = False
    cancelled: bool = False
    shell_restarted: bool = False
    idle: bool = False
    running: bool = False


@dataclass(frozen=True, kw_only=True)
class ShellState:
    """Hold what a new shell needs to go on, as commands that its kind of shell understands.

    `exports` is `declare -px` (or `export -p`) text; `options` are the `set` and `shopt` commands
    that a fresh shell does not have from the start.
    """

    cwd: str
    exports: str
    functions: str = ""
    aliases: str = ""
    options: str = ""

    @property
    def restores_more_than_the_directory(self) -> bool:
        """Tell whether there is anything but a directory."""
        return bool(self.exports or self.functions or self.aliases or self.options)

    def as_dict(self) -> dict[str, str]:
        """Return the state as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a state from `as_dict`'s values, or `cwd` and `exports` alone; raises KeyError."""
        rest = {key: str(data.get(key, "")) for key in ("functions", "aliases", "options")}
        return cls(cwd=str(data["cwd"]), exports=str(data["exports"]), **rest)


@dataclass(frozen=True, kw_only=True)
class PythonResult:
    """Hold what one cell left: text in order, and images as (MIME type, bytes).

    `error` is the traceback, empty when there was none. `restarted` says that the
    interpreter ended and an empty one took its place.
    """

    output: str
    error: str = ""
    images: tuple[tuple[str, bytes], ...] = ()
    duration_seconds: float
    truncated: bool = False
    timed_out: bool = False
    cancelled: bool = False
    restarted: bool = False


class PythonSession(Protocol):
    """Keep one Python interpreter; names survive from cell to cell. One thread at a time."""

    @property
    def kind(self) -> str:
        """Return "ipython", or "python" where the image has no IPython."""
        ...

    def run(
        self,
        code: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> PythonResult:
        """Run a cell; raises SandboxGone, PythonFailed.

        At the timeout, or when cancelled, it is interrupted, then killed.
        """
        ...

    def close(self) -> None:
        """End the interpreter and every process of its session; idempotent."""
        ...


class ShellSession(Protocol):
    """Keep one shell, a bash where there is one; state survives from command to command.

    One thread at a time.
    """

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
        """Run a command; raises SandboxGone, ShellFailed.

        At the timeout, after `idle_seconds` without output, or when cancelled, the command
        is interrupted, then killed. An `interactive` one reads the terminal, and is left
        running (`CommandResult.running`) when it is silent or late, for `send` to go on.
        """
        ...

    def send(
        self,
        text: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Type text, control characters included, at the program left running by `run`.

        Raises SandboxGone, ShellFailed; exit code 126 with a message when nothing runs.
        """
        ...

    def state(self) -> ShellState:
        """Return the state after the last command that ended, without running one."""
        ...

    def restore(self, state: ShellState) -> None:
        """Take over a state; a missing directory leaves /, what a sh cannot restore is left out."""
        ...

    def close(self) -> None:
        """End the shell and every process of its session; idempotent."""
        ...
