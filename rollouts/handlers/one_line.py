"""Read one line of a small model's answer as a shell command or a submission."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollouts.handlers.base import Action

FENCE = re.compile(r"^```[\w+-]*$")
INLINE_LANGUAGE = re.compile(r"(?:bash|sh|shell|console)\s+")
PROMPT = re.compile(r"^\$\s+")

NO_COMMAND = (
    "No command found. Answer with one line: a shell command, or submit when the task is done."
)
CUT_OFF = (
    "Your line was cut off because it was too long, so it was not run. "
    "Answer with one shorter line: a shell command, or submit when the task is done."
)


def parse_one_line(text: str, *, complete: bool) -> Action:
    """Return what the first line that is not empty says; the rest is ignored.

    Code fences and a leading `$ ` are taken off. `submit` alone or followed by an answer is a
    submission. With `complete` false the text was cut by a token limit: a last line is then
    not trusted, since half a command may do something else than the whole.
    """
    for line, whole in _lines(text, complete=complete):
        if not whole:
            return Action(kind="malformed", text=CUT_OFF)
        if line == "submit":
            return Action(kind="submit", text=None)
        if line.startswith("submit "):
            return Action(kind="submit", text=line.removeprefix("submit ").strip() or None)
        return Action(kind="command", text=line)
    return Action(kind="malformed", text=NO_COMMAND)


def _lines(text: str, *, complete: bool) -> Iterator[tuple[str, bool]]:
    lines = text.split("\n")
    for number, raw in enumerate(lines):
        line = _bare(raw.strip())
        if line:
            yield line, complete or number < len(lines) - 1


def _bare(line: str) -> str:
    if FENCE.match(line):
        return ""
    if len(line) >= len("``````") and line.startswith("```") and line.endswith("```"):
        inside = line[3:-3]
        language = INLINE_LANGUAGE.match(inside)
        line = inside[language.end() if language else 0 :].strip()
    elif len(line) > 2 and line[0] == line[-1] == "`" and "`" not in line[1:-1]:
        line = line[1:-1].strip()
    return PROMPT.sub("", line)
