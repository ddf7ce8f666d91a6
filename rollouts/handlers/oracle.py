"""Do a task as its author did: what an evaluator must pay in full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollouts.handlers.base import (
    AgentCancelled,
    AgentContext,
    AgentHandler,
    AgentResult,
    CommandInterrupted,
    Message,
    StopReason,
)

FOLDER = "/solution"
SCRIPT = "solve.sh"
OUTPUT_BYTES = 64 * 1024
PROBE_SECONDS = 30.0
# The task's own working directory, as its author ran it.
_SOLVE = 'cd "$1" && exec bash "$2"'

Files = Mapping[str, tuple[bytes, int]]
Write = Callable[[Files], None]


class OracleHandler(AgentHandler):
    """Run the task's hidden solution, give its reference answer, or both.

    For verifications only: it is made with what no environment and no policy ever gets, so no
    registry holds it. `files` are the solution, by path below `/solution`; `write` puts files by
    absolute path into the sandbox.
    """

    name = "oracle"
    description = "The reference solution."
    needs_sandbox = False

    def __init__(
        self, *, files: Files, answer: str | None, write: Write | None, workdir: str
    ) -> None:
        self._files = files
        self._answer = answer
        self._write = write
        self._workdir = workdir

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Accept any: it reads none."""

    def run(self, context: AgentContext) -> AgentResult:
        """Return the solution's episode.

        Raises `AgentCancelled`, and `CommandInterrupted` when another worker died over it: what a
        solution has half done is no ground for it to begin again.
        """
        messages: list[Message] = [{"role": "user", "content": context.instruction}]
        stop_reason, seconds = StopReason.FINISHED, 0.0
        if SCRIPT in self._files and context.sandbox is not None and self._write is not None:
            before = context.clock()
            output, stop_reason = self._solve(context)
            seconds = context.clock() - before
            messages.append({"role": "assistant", "content": f"bash {FOLDER}/{SCRIPT}"})
            messages.append({"role": "tool", "name": "bash", "content": output})
        if self._answer is not None:
            messages.append({"role": "assistant", "content": self._answer})
        return AgentResult(
            stop_reason=stop_reason,
            answer=self._answer,
            messages=tuple(messages),
            tool_seconds=seconds,
        )

    def _solve(self, context: AgentContext) -> tuple[str, StopReason]:
        sandbox, write = context.sandbox, self._write
        assert sandbox is not None
        assert write is not None
        there = sandbox.run(
            ["test", "-e", f"{FOLDER}/{SCRIPT}"], timeout_seconds=PROBE_SECONDS, output_bytes=1024
        )
        if there.exit_code == 0:
            raise CommandInterrupted("the solution was begun by a worker that died")
        write({f"{FOLDER}/{path}": content for path, content in self._files.items()})
        result = sandbox.run(
            ["bash", "-c", _SOLVE, "oracle", self._workdir, f"{FOLDER}/{SCRIPT}"],
            timeout_seconds=max(1.0, context.budget.deadline - context.clock()),
            output_bytes=OUTPUT_BYTES,
            cancelled=context.cancelled,
        )
        if result.cancelled or context.cancelled():
            raise AgentCancelled("the rollout was cancelled")
        output = context.mask((result.stdout + result.stderr).decode(errors="replace"))
        if result.timed_out:
            return f"{output}\n[not ended in time]", StopReason.AGENT_TIMEOUT
        return f"{output}\n[exit code: {result.exit_code}]", StopReason.FINISHED
