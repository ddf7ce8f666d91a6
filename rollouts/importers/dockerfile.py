"""Read a Dockerfile: its instructions, and what can be honoured without building it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s*([A-Za-z]+)\s+(.*)$", re.DOTALL)
HEREDOC = re.compile(r"(?<!<)<<(-?)([\"']?)([A-Za-z_]\w*)\2")


def last_workdir(text: str) -> str | None:
    """Return the last `WORKDIR`; comments and here-documents do not confuse it."""
    workdirs = [
        each.rest for each in read_instructions(text) if each.word == "WORKDIR" and each.rest
    ]
    return workdirs[-1].strip("\"'") if workdirs else None


@dataclass(frozen=True, kw_only=True)
class Heredoc:
    """Hold a here-document: the word that ends it, and its lines."""

    word: str
    strips_tabs: bool
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return what it says, as the shell would read it."""
        lines = [line.lstrip("\t") if self.strips_tabs else line for line in self.lines]
        return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """Hold one instruction: its line, its word in capitals, the rest, its here-documents."""

    line: int
    word: str
    rest: str
    heredocs: tuple[Heredoc, ...] = ()


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions; comments and continued lines are resolved as Docker does.

    What is no instruction, or says nothing, has an empty `rest`. Empty lines end no instruction.
    """
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line
        while whole.rstrip().endswith("\\"):
            following = next(lines, None)
            if following is None:
                whole = whole.rstrip()[:-1]
            elif following[1].strip() and not following[1].lstrip().startswith("#"):
                whole = whole.rstrip()[:-1] + following[1]
        heredocs = tuple(
            _heredoc(word, bool(tabs), lines) for tabs, _quote, word in HEREDOC.findall(whole)
        )
        match = INSTRUCTION.match(whole)
        word, rest = match.groups() if match else (whole.split()[0][:40], "")
        yield Instruction(line=number, word=word.upper(), rest=rest.strip(), heredocs=heredocs)


def _heredoc(word: str, strips_tabs: bool, lines: Iterator[tuple[int, str]]) -> Heredoc:
    body = []
    for _, inner in lines:
        if (inner.lstrip("\t") if strips_tabs else inner).rstrip() == word:
            break
        body.append(inner)
    return Heredoc(word=word, strips_tabs=strips_tabs, lines=tuple(body))
