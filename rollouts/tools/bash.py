"""Run a command in the episode's persistent shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from rollouts.tools.base import InvalidArguments, Tool, ToolContext, ToolResult, ToolUnavailable

if TYPE_CHECKING:
    from sandboxes.runtime.protocol import CommandResult

MAX_COMMAND_CHARACTERS = 100_000


class BashTool(Tool):
    """Offer one bash that stays open: directory and variables survive from call to call.

    A call gets `timeout_seconds` or the smaller time the policy asks for, and never more than
    the episode has left; observations carry `output_bytes` of output at most.
    """

    name = "bash"
    description = (
        "Run a command in a bash shell that stays open: the directory, variables and "
        "background jobs survive from call to call. No input can be typed into it."
    )
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_COMMAND_CHARACTERS,
                "description": "The command, of one or more lines.",
            },
            "timeout_seconds": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Seconds after which the command is ended.",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    }

    def __init__(self, *, timeout_seconds: float = 60.0, output_bytes: int = 16_384) -> None:
        self.timeout_seconds = timeout_seconds
        self.output_bytes = output_bytes

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run the command; raises `ToolUnavailable` without a shell, faults of the sandbox."""
        self.check(arguments)
        command = _runnable(arguments["command"])
        if context.shell is None:
            raise ToolUnavailable("the bash tool needs a sandbox, and this rollout has none")
        limit = min(
            self.timeout_seconds,
            arguments.get("timeout_seconds", self.timeout_seconds),
            context.timeout_seconds,
        )
        result = context.shell.run(
            command,
            timeout_seconds=limit,
            output_bytes=self.output_bytes,
            cancelled=context.cancelled,
        )
        return ToolResult(
            content=describe(result, timeout_seconds=limit, output_bytes=self.output_bytes),
            data={
                "exit_code": result.exit_code,
                "cwd": result.cwd,
                "duration_seconds": result.duration_seconds,
                "truncated": result.truncated,
                "timed_out": result.timed_out,
                "cancelled": result.cancelled,
                "shell_restarted": result.shell_restarted,
            },
        )


def describe(result: CommandResult, *, timeout_seconds: float, output_bytes: int) -> str:
    """Return the observation: the output, then one bracketed line for each thing to know."""
    lines = [result.output.rstrip("\n") or "(no output)"]
    if result.truncated:
        lines.append(
            f"[output truncated: only the beginning and the end, {output_bytes} bytes together, "
            "are shown; narrow it with head, tail or grep, or write it to a file]"
        )
    if result.timed_out:
        lines.append(
            f"[timed out: the command was ended after {timeout_seconds:g} seconds; "
            "run something shorter, or put it in the background with &]"
        )
    if result.cancelled:
        lines.append("[cancelled: the command was ended before it finished]")
    if result.shell_restarted:
        lines.append(
            "[the shell ended and a new one took its place: directory and exported variables "
            "were kept, functions, aliases and background jobs were not]"
        )
    if result.exit_code is not None:
        lines.append(f"[exit code: {result.exit_code}]")
    elif not (result.timed_out or result.cancelled):
        lines.append("[exit code: unknown, the command did not end by itself]")
    return "\n".join(lines)


def _runnable(command: str) -> str:
    if not command.strip():
        raise InvalidArguments("The command is empty.")
    if "\0" in command:
        raise InvalidArguments("The command holds a NUL character, which no shell accepts.")
    try:
        command.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments("The command is not valid Unicode text.") from error
    return command
