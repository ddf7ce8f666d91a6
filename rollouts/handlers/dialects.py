"""Read a sampled turn as an action: plain answer, one fenced command, or tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollouts.handlers.base import Action, Message
from rollouts.handlers.one_line import parse_one_line
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.parsing.fences import fenced_blocks

SHELLS = ("bash", "sh", "shell")
NO_BLOCK = (
    "No command found. Write exactly one command in a block that begins with ```bash and ends "
    "with ```; write submit in it when the task is done."
)
MANY_BLOCKS = (
    "Found {count} command blocks, so none was run. Write exactly one ```bash block; join "
    "commands with && or write them on lines of their own in it."
)
CUT_BLOCK = (
    "Your answer was cut off because it was too long, so nothing was run. Write less, and exactly "
    "one ```bash block."
)
NO_CALL = "You called no tool. Call one of your tools; call submit when the task is done."
CUT_CALL = (
    "Your answer was cut off because it was too long, before you called a tool. Write less, and "
    "call a tool."
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Hold a sampled turn as it is read: `complete` is false when a limit cut it."""

    text: Callable[[], str]
    parsed: Callable[[], ParsedTurn]
    complete: bool


Read = Callable[[Turn], Action]


def read_line(turn: Turn) -> Action:
    """Read the first line as a command or a submission."""
    return parse_one_line(turn.text(), complete=turn.complete)


def read_answer(turn: Turn) -> Action:
    """Take the text as the answer, whatever it says."""
    return Action(kind="answer", text=turn.text())


def read_block(turn: Turn) -> Action:
    """Read the one fenced command outside of thoughts; `submit` in it is a submission.

    A block that was closed is whole even where a limit cut the text after it.
    """
    blocks = [body.strip() for body in fenced_blocks(turn.parsed().content, SHELLS)]
    if len(blocks) > 1:
        return Action(kind="malformed", text=MANY_BLOCKS.format(count=len(blocks)))
    if not blocks or not blocks[0]:
        return Action(kind="malformed", text=NO_BLOCK if turn.complete else CUT_BLOCK)
    first, _, rest = blocks[0].partition(" ")
    if first == "submit" and "\n" not in blocks[0]:
        return Action(kind="submit", text=rest.strip() or None)
    return Action(kind="command", text=blocks[0])


def read_calls(no_call: str) -> Read:
    """Return the reading of native tool calls; `no_call` is `answer` or `nudge`."""

    def read(turn: Turn) -> Action:
        parsed = turn.parsed()
        message = assistant_message(parsed)
        if parsed.calls:
            return Action(kind="calls", text=None, calls=parsed.calls, message=message)
        if not turn.complete:
            return Action(kind="malformed", text=CUT_CALL, message=message)
        if no_call == "nudge":
            return Action(kind="malformed", text=NO_CALL, message=message)
        return Action(kind="answer", text=parsed.content, message=message)

    return read


def of_text_only(action: Action, parsed: ParsedTurn, counted_tokens: int) -> Action:
    """Add what no token ids can tell when an episode goes on: the message and its size."""
    message = action.message or {"role": "assistant", "content": parsed.content}
    return replace(action, message=message, counted_tokens=counted_tokens)


def assistant_message(parsed: ParsedTurn) -> Message:
    """Return a parsed turn as a message.

    A call that could not be read stands there with no arguments: its tokens are in the trace.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name or "unreadable",
                    "arguments": json.dumps(dict(call.arguments or {})),
                },
            }
            for call in parsed.calls
        ]
    return message
