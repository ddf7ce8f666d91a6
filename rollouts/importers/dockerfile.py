"""Read from a Dockerfile what can be honoured without building it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s*([A-Za-z]+)\s+(.*)$", re.DOTALL)
BUILDING = frozenset({"RUN", "COPY", "ADD"})


@dataclass(frozen=True, kw_only=True)
class DockerfileFacts:
    """Hold the last `WORKDIR` and the first line that only a build could carry out."""

    workdir: str | None
    building_line: int | None
    building_instruction: str | None


def read_dockerfile(text: str) -> DockerfileFacts:
    """Return the facts; comments, continued lines and here-documents do not confuse it."""
    workdir = None
    building: tuple[int, str] | None = None
    for number, line in _logical_lines(text):
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        word, rest = match.group(1).upper(), match.group(2).strip()
        if word == "WORKDIR":
            workdir = rest.strip("\"'")
        elif word in BUILDING and building is None:
            building = number, word
    return DockerfileFacts(
        workdir=workdir,
        building_line=building[0] if building else None,
        building_instruction=building[1] if building else None,
    )


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line
        while whole.endswith("\\"):
            _, following = next(lines, (0, ""))
            if not following.lstrip().startswith("#"):
                whole = whole[:-1] + following
        for marker in re.findall(r"<<-?\s*[\"']?(\w+)[\"']?", whole):
            for _, inner in lines:
                if inner.strip() == marker:
                    break
        yield number, whole
