"""Make a conversation shorter when it no longer fits the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollouts.handlers.base import Message
from rollouts.handlers.settings import read_choice

T = TypeVar("T")
STOP, TRUNCATE, COMPACT = "stop", "truncate", "compact"
FORK_REASONS = {TRUNCATE: "truncated", COMPACT: "compacted"}
KEPT_IN_FULL = (8, 4, 2, 1)  # newest observations that compaction leaves alone, gentlest first
LONG = 200  # characters; a shorter observation is not worth a note


def read_context_policy(settings: Mapping[str, Any]) -> str:
    """Return `context_policy`: `stop`, `truncate` or `compact`."""
    return read_choice(settings, "context_policy", STOP, (STOP, TRUNCATE, COMPACT))


def shorter(policy: str, messages: Sequence[Message], head: int) -> list[list[Message]]:
    """Return shorter forms of a conversation, the gentlest first; none where nothing can go.

    The first `head` messages (system prompt, demonstrations, task) always stay, and so does the
    newest turn with what it led to.
    """
    if policy == TRUNCATE:
        starts = [n for n in range(head, len(messages)) if messages[n]["role"] == "assistant"]
        return [[*messages[:head], *messages[start:]] for start in starts[1:]]
    if policy == COMPACT:
        forms = [_compacted(messages, head, kept) for kept in KEPT_IN_FULL]
        return [form for form in forms if form != list(messages)]
    return []


def first_fitting(forms: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """Return the first form that fits, or the last one; None without any.

    Each form is shorter than the one before, so few of them have to be rendered.
    """
    low, high = 0, len(forms) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(forms[middle]):
            high = middle
        else:
            low = middle + 1
    return forms[low] if forms else None


def _compacted(messages: Sequence[Message], head: int, kept: int) -> list[Message]:
    observations = [n for n in range(head, len(messages)) if messages[n]["role"] != "assistant"]
    old = set(observations[:-kept])
    return [
        {**message, "content": _note(str(message["content"]))} if number in old else message
        for number, message in enumerate(messages)
    ]


def _note(content: str) -> str:
    if len(content) <= LONG:
        return content
    return f"[{len(content)} characters of earlier output were left out]"
