"""Turn a stored trajectory into plain text that can be shown: what is in it is hostile."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.admin.shown import cut, plain

MAX_TURNS = 200
MAX_CHARACTERS = 10_000


@dataclass(frozen=True)
class Turn:
    """One message: who said it and its text, without characters that act."""

    role: str
    text: str


@dataclass(frozen=True)
class SegmentCounts:
    """Tokens of one segment."""

    number: int
    prompt: int
    response: int
    sampled: int


def read_turns(messages: Any) -> list[Turn]:
    """Return the messages as text, at most `MAX_TURNS`; it says how many are left out."""
    rows = messages if isinstance(messages, list) else []
    turns = [_turn(row) for row in rows[:MAX_TURNS]]
    if len(rows) > MAX_TURNS:
        turns.append(Turn("…", f"{len(rows) - MAX_TURNS} more messages; read them over the API."))
    return turns


def read_segments(segments: Any) -> list[SegmentCounts]:
    """Return the token counts of each segment."""
    rows = segments if isinstance(segments, list) else []
    return [
        SegmentCounts(
            number,
            len(row["prompt_ids"]),
            len(row["response_ids"]),
            sum(row["response_mask"]),
        )
        for number, row in enumerate(rows)
    ]


def _turn(row: Any) -> Turn:
    if not isinstance(row, Mapping):
        return Turn("?", _cut(json.dumps(row)))
    calls = row.get("tool_calls") or []
    text = _content(row.get("content"))
    text += "".join(f"\n[calls] {_call(call)}" for call in calls)
    if not calls and "content" not in row:
        text = json.dumps(row, ensure_ascii=False)
    return Turn(plain(str(row.get("role", "?")))[:40], _cut(text.strip("\n")))


def _call(call: Any) -> str:
    """Return a tool's name and its arguments; a call of another form as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not {"name", "arguments"} <= set(function):
        return json.dumps(call, ensure_ascii=False)
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{function['name']} {arguments}"


def _content(content: Any) -> str:
    """Return a message's text; parts that are not text are named."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"[{part.get('type', 'part')}]"))
            if isinstance(part, Mapping)
            else json.dumps(part)
            for part in content
        )
    return "" if content is None else json.dumps(content)


def _cut(text: str) -> str:
    return cut(text, MAX_CHARACTERS)
