"""Run a command in the episode's persistent shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollouts.tools.base import InvalidArguments, Tool, ToolContext, ToolResult, ToolUnavailable

if TYPE_CHECKING:
    from sandboxes.runtime.sessions import CommandResult, ShellSession

MAX_COMMAND_CHARACTERS = 100_000
# JSON can write control characters, and models rarely do: these spellings are taken as meant.
_KEYS = {"C-c": "\x03", "C-d": "\x04", "C-z": "\x1a"}


class BashTool(Tool):
    """Offer one bash that stays open: directory and variables survive from call to call.

    A call gets `timeout_seconds` or the smaller time the policy asks for, and never more than
    the episode has left; observations carry `output_bytes` of output at most. An interactive
    program is left running, to be typed at, once it was silent for `idle_seconds`.
    """

    name = "bash"
    description = (
        "Run a command in a bash shell that stays open: the directory, variables and background "
        "jobs survive from call to call. Set interactive for a program that reads from the "
        "terminal; when it waits, answer it with input."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_COMMAND_CHARACTERS,
                "description": "The command, of one or more lines.",
            },
            "interactive": {
                "type": "boolean",
                "description": "Let the command read from the terminal and leave it running "
                "while it waits.",
            },
            "input": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_COMMAND_CHARACTERS,
                "description": "Text typed at the program that was left running, instead of a "
                "command; end a line with a newline. C-c, C-d or C-z alone is that key.",
            },
            "timeout_seconds": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Seconds after which the command is ended.",
            },
        },
        "additionalProperties": False,
    }

    def __init__(
        self,
        *,
        timeout_seconds: float = 60.0,
        output_bytes: int = 16_384,
        idle_seconds: float = 3.0,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.output_bytes = output_bytes
        self.idle_seconds = idle_seconds

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run or type; raises `ToolUnavailable` without a shell, faults of the sandbox."""
        self.check(arguments)
        _check_combination(arguments)
        if context.shell is None:
            raise ToolUnavailable("the bash tool needs a sandbox, and this rollout has none")
        limit = min(
            self.timeout_seconds,
            arguments.get("timeout_seconds", self.timeout_seconds),
            context.timeout_seconds,
        )
        result = self._act(context.shell, arguments, limit, context)
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
                "running": result.running,
            },
        )

    def _act(
        self,
        shell: ShellSession,
        arguments: Mapping[str, Any],
        limit: float,
        context: ToolContext,
    ) -> CommandResult:
        typed = arguments.get("input")
        if typed is not None:
            return shell.send(
                _KEYS.get(typed, typed),
                timeout_seconds=limit,
                idle_seconds=self.idle_seconds,
                output_bytes=self.output_bytes,
                cancelled=context.cancelled,
            )
        interactive = bool(arguments.get("interactive", False))
        return shell.run(
            arguments["command"],
            timeout_seconds=limit,
            idle_seconds=self.idle_seconds if interactive else None,
            interactive=interactive,
            output_bytes=self.output_bytes,
            cancelled=context.cancelled,
        )


def describe(result: CommandResult, *, timeout_seconds: float, output_bytes: int) -> str:
    """Return the observation: the output, then one bracketed line for each thing to know."""
    lines = [result.output.rstrip("\n") or "(no output)"]
    if result.truncated:
        lines.append(
            f"[output truncated: only the beginning and the end, {output_bytes} bytes together, "
            "are shown; narrow it with head, tail or grep, or write it to a file]"
        )
    if result.running:
        lines.append(
            "[still running: answer it with input, wait with input of a newline, or end it with "
            "input C-c; a new command ends it first]"
        )
    elif result.timed_out:
        lines.append(
            f"[timed out: the command was ended after {timeout_seconds:g} seconds; "
            "run something shorter, or put it in the background with &]"
        )
    if result.idle and not result.running:
        lines.append("[silent for too long: the command was ended]")
    if result.cancelled:
        lines.append("[cancelled: the command was ended before it finished]")
    if result.shell_restarted:
        lines.append(
            "[the shell ended and a new one took its place: directory, exported variables, "
            "functions, aliases and shell options were kept; other variables, traps and "
            "background jobs were lost]"
        )
    if result.exit_code is not None:
        lines.append(f"[exit code: {result.exit_code}]")
    elif not (result.timed_out or result.cancelled or result.idle or result.running):
        lines.append("[exit code: unknown, the command did not end by itself]")
    return "\n".join(lines)


def _check_combination(arguments: Mapping[str, Any]) -> None:
    command, typed = arguments.get("command"), arguments.get("input")
    if (command is None) == (typed is None):
        raise InvalidArguments(
            "Give command to run something, or input to type at the program left running: "
            "exactly one of them."
        )
    if typed is not None and "interactive" in arguments:
        raise InvalidArguments("interactive belongs to command; input needs no flag.")
    if command is not None and not command.strip():
        raise InvalidArguments("The command is empty.")
    if command is not None and "\0" in command:
        raise InvalidArguments("The command holds a NUL character, which no shell accepts.")
    try:
        (command or typed or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments("The text is not valid Unicode.") from error
