"""Read `<function=…><parameter=…>…`, in which values stand unquoted: one pass over the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rollouts.inference.parsing.attempts import (
    MALFORMED,
    NO_NAME,
    Attempt,
    Tool,
    parameter_types,
)

OPEN_FUNCTION, CLOSE_FUNCTION = "<function=", "</function>"
OPEN_PARAMETER, CLOSE_PARAMETER = "<parameter=", "</parameter>"


def ends_function(text: str, begin: int, end: int) -> bool:
    """Say whether a function is closed right before `end`, spaces aside; it began at `begin`."""
    while end > begin and text[end - 1].isspace():
        end -= 1
    return text.endswith(CLOSE_FUNCTION, begin, end)


def xml_call(body: str, tools: Sequence[Tool] | None) -> Attempt:
    """Read one call; its values are those that the schemas of the tools say."""
    inside = body.strip()
    head, closed, _ = inside.partition(">")
    if (
        not inside.startswith(OPEN_FUNCTION)
        or not inside.endswith(CLOSE_FUNCTION)
        or not closed
        or "\n" in head
        or len(head) + 1 > len(inside) - len(CLOSE_FUNCTION)
    ):
        return Attempt(complaint=MALFORMED)
    name = head.removeprefix(OPEN_FUNCTION).strip()
    if not name:
        return Attempt(complaint=NO_NAME)
    types = parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    for pair in _parameters(inside[len(head) + 1 : -len(CLOSE_FUNCTION)].strip()):
        if pair is None:
            return Attempt(name, complaint=MALFORMED)
        key = pair[0].strip()
        arguments[key] = _value(pair[1], types.get(key))
    return Attempt(name, arguments)


def _parameters(text: str) -> Iterator[tuple[str, str] | None]:
    """Give each parameter's name and value; None, and then no more, where there is another text.

    A value may hold the closing mark: the one that counts stands before the next or at the end.
    """
    position = 0
    while position < len(text):
        begin = text.find(">", position)
        key = text[position:begin].removeprefix(OPEN_PARAMETER)
        if begin < 0 or not text.startswith(OPEN_PARAMETER, position) or not key or "\n" in key:
            yield None
            return
        close = text.find(CLOSE_PARAMETER, begin)
        following = _after_space(text, close + len(CLOSE_PARAMETER))
        while close >= 0 and not _begins_or_ends(text, following):
            close = text.find(CLOSE_PARAMETER, close + 1)
            following = _after_space(text, close + len(CLOSE_PARAMETER))
        if close < 0:
            yield None
            return
        yield key, text[begin + 1 : close]
        position = following


def _begins_or_ends(text: str, position: int) -> bool:
    return position >= len(text) or text.startswith(OPEN_PARAMETER, position)


def _after_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _value(value: str, kind: Any) -> Any:
    """Return a value as its schema says; one line break on each side is the form's own."""
    value = value.removeprefix("\n").removesuffix("\n")
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
