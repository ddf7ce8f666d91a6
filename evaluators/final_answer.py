r"""Find where a text says its final answer: `\boxed{…}`, `Answer: …`, `#### …`, `<answer>…`.

Plain scans and patterns without nested repetition: the time is linear in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evaluators.base import JsonMap
from evaluators.settings import read_count

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_STATEMENTS = 200  # of each kind, the last ones
THINKING_ENDS = ("</think>", "</thinking>", "<|channel|>final<|message|>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_MARKER = re.compile(
    r"(?:\bfinal answer\b|\banswer\b|\bans\b)(?:\*\*|__)?"
    r"(?:[ \t]*[:\uff1a=]|[ \t]+is\b[ \t]*:?)(?:\*\*|__)?",
    re.IGNORECASE,
)
_TAG = re.compile(r"<(answer|final_answer|final|choice)>\s*([^<>]{1,2000}?)\s*</\1>", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One statement of the answer: its text and how it was marked."""

    text: str
    how: str  # boxed, answer_line, hashes, tag
    end: int  # where it ends in the text


def read_tail(settings: JsonMap) -> int:
    """Return `tail_characters`: how much of the end is looked at, 0 for all of it."""
    return read_count(settings, "tail_characters", 0, least=0, most=MAX_SOURCE_CHARACTERS)


def last_part(text: str, *, tail_characters: int, skip_thinking: bool) -> str:
    """Return the part of a text where its answer is looked for."""
    text = text[-MAX_SOURCE_CHARACTERS:]
    if skip_thinking:
        for ending in THINKING_ENDS:
            text = text.rpartition(ending)[2]
    return text[-tail_characters:] if tail_characters else text


def boxes(text: str) -> list[Found]:
    r"""Return the contents of `\boxed{…}` (or `\boxed 5`) in order, without the empty ones.

    Of nested boxes the innermost count; a box that is never closed is none.
    """
    found = []
    for match in list(_BOX.finditer(text))[-MAX_STATEMENTS:]:
        start = match.end()
        if text[start : start + 1] != "{":
            word = re.match(r"[^\s$\\{}]+", text[start : start + 200])
            if word and not match.group().endswith("d"):
                found.append(Found(text=word[0].rstrip(".,;"), how="boxed", end=start))
            continue
        end = _closing(text, start)
        inside = text[start + 1 : end].strip() if end else ""
        if inside and not _BOX.search(inside) and set(inside) - set(". _?\u2026"):
            found.append(Found(text=inside, how="boxed", end=end))
    return found


def answer_lines(text: str) -> list[Found]:
    """Return what follows `Answer:`, `the answer is` or `####` in the line, or `<answer>` encloses.

    Where the rest of the line is empty, the next line that is not counts.
    """
    found = []
    for how, pattern in (("answer_line", _MARKER), ("hashes", _HASHES)):
        for match in list(pattern.finditer(text))[-MAX_STATEMENTS:]:
            start = match.end()
            rest = text[start : start + 2000].lstrip(" \t*_\r\n")
            line = rest.partition("\n")[0].strip()
            if line:
                found.append(Found(text=line, how=how, end=start + len(line)))
    for match in list(_TAG.finditer(text))[-MAX_STATEMENTS:]:
        found.append(Found(text=match[2], how="tag", end=match.end()))
    return sorted(found, key=lambda each: each.end)


def _closing(text: str, start: int) -> int:
    """Return where the brace that opens at `start` is closed, 0 when it is not."""
    depth = 0
    position = start
    limit = min(len(text), start + 10_000)
    while position < limit:
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return 0
