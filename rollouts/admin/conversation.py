"""Turn a stored trajectory into plain text that can be shown: what is in it is hostile."""

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def plain(text: str) -> str:
    """Return text in which control and direction characters are written out as `\\x1b`.

    Line feeds and tabs stay. Terminal escapes, right-to-left overrides and zero-width characters
    could otherwise make a page say what the agent did not.
    """
    return "\n".join(
        line if line.isprintable() else "".join(map(_shown, line)) for line in text.split("\n")
    )


def _shown(letter: str) -> str:
    """Return a letter, or its escape: printable is what is neither Other nor a line separator."""
    if letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()


def _turn(row: Any) -> Turn:
    if not isinstance(row, Mapping):
        return Turn("?", _cut(json.dumps(row)))
    text = _content(row.get("content"))
    for call in row.get("tool_calls") or []:
        text += f"\n[calls] {json.dumps(call)}"
    return Turn(plain(str(row.get("role", "?")))[:40], _cut(text.strip("\n")))


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
    shown = plain(text[:MAX_CHARACTERS])
    left = len(text) - MAX_CHARACTERS
    return f"{shown}\n[{left} more characters]" if left > 0 else shown
