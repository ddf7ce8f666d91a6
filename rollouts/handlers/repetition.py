"""Notice a policy that says the same thing over and over."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollouts.handlers.base import Message

LEAST_DISTINCT_WORDS = 3  # a table of zeros is not a loop


def is_degenerate(text: str, *, words: int, times: int) -> bool:
    """Tell whether one run of `words` words stands at least `times` times in a text.

    Runs do not overlap, and a run of fewer than three distinct words is not counted. `times` 0
    turns this off.
    """
    found = text.split()
    if not times or len(found) < words * times:
        return False
    counted: Counter[tuple[str, ...]] = Counter()
    last: dict[tuple[str, ...], int] = {}
    for place in range(len(found) - words + 1):
        run = tuple(found[place : place + words])
        if place - last.get(run, -words) < words or len(set(run)) < LEAST_DISTINCT_WORDS:
            continue
        last[run] = place
        counted[run] += 1
        if counted[run] >= times:
            return True
    return False


def said_in(message: Message) -> str:
    """Return all that the policy wrote in one turn: thoughts, text and arguments of calls."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    parts = [message.get("reasoning_content"), message.get("content")]
    parts += [call["function"]["arguments"] for call in calls]
    return "\n".join(part for part in parts if part)
