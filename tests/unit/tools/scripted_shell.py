"""A shell that answers what a test tells it to, for tests of what sits on top of shells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, CommandResult, ShellState


def result(output: str = "", exit_code: int | None = 0, **flags: bool) -> CommandResult:
    """Return a command's result with the usual rest."""
    return CommandResult(
        output=output, exit_code=exit_code, cwd="/app", duration_seconds=0.5, **flags
    )


@dataclass
class ScriptedShell:
    """Answer each command from a table, or with nothing; keep what was asked."""

    answers: dict[str, CommandResult | Exception] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    limits: list[tuple[float, int]] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    idles: list[tuple[float | None, bool]] = field(default_factory=list)
    after_run: Callable[[], None] = lambda: None

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        interactive: bool = False,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Callable[[], bool] | None = None,  # noqa: ARG002
    ) -> CommandResult:
        self.commands.append(command)
        self.idles.append((idle_seconds, interactive))
        self.limits.append((timeout_seconds, output_bytes))
        answer = self.answers.get(command, result())
        self.after_run()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(
        self,
        text: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Callable[[], bool] | None = None,  # noqa: ARG002
    ) -> CommandResult:
        self.typed.append(text)
        self.limits.append((timeout_seconds, output_bytes))
        self.idles.append((idle_seconds, True))
        answer = self.answers.get(text, result())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def state(self) -> ShellState:
        return ShellState(cwd="/app", exports=f"after {len(self.commands)}")

    def restore(self, state: ShellState) -> None:  # noqa: ARG002
        raise AssertionError("restoring is not the handler's work")

    def close(self) -> None:
        raise AssertionError("closing is not the handler's work")
