"""The script: which assistant text comes next in which conversation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.tiny_server.json_http import HttpError
from rollouts.inference.tokenizer_folder import TokenizerFolder


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one assistant turn. `cut` plays it without its end of turn, as a length limit does."""

    text: str
    cut: bool = False
    delay_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """Hold the turns of every conversation whose prompt contains `marker`.

    `after` is played once the turns are used up; without it that is an error.
    """

    marker: str
    turns: tuple[Line, ...]
    after: Line | None = None


class Script:
    """Find the next line for a prompt. Stateless: the same prompt gets the same line.

    The turn is the number of assistant turns since the marker first appears, so markers
    belong into the task's instruction, after any demonstration.
    """

    def __init__(self, parts: Sequence[Part], folder: TokenizerFolder) -> None:
        self._parts = sorted(parts, key=lambda part: len(part.marker), reverse=True)
        self._folder = folder
        probe = [{"role": "user", "content": "a"}]
        without = folder.apply_template(messages=probe, add_generation_prompt=False)
        opening = folder.apply_template(messages=probe, add_generation_prompt=True)
        self._opening = folder.encode_with_control(opening[len(without) :])

    def next_line(self, prompt_ids: Sequence[int]) -> Line:
        """Return what the assistant says next; raise HttpError 400 when the script is silent."""
        pieces = [self._folder.decode(piece) for piece in _split(list(prompt_ids), self._opening)]
        for part in self._parts:
            place = next((i for i, text in enumerate(pieces) if part.marker in text), None)
            if place is None:
                continue
            turn = len(pieces) - 2 - place
            if 0 <= turn < len(part.turns):
                return part.turns[turn]
            if turn >= 0 and part.after is not None:
                return part.after
            raise HttpError(400, f"the script for {part.marker!r} has no turn {turn}")
        raise HttpError(400, "no marker of the script is in the prompt")


def parse_script(body: dict[str, Any], folder: TokenizerFolder) -> Script:
    """Return a script from `{"parts": [{"marker", "turns": [text | line], "after"?}]}`.

    A line is a text or `{"text", "cut"?, "delay_seconds"?}`; the empty marker fits every
    prompt. Raises HttpError 400.
    """
    try:
        parts = [
            Part(
                marker=str(part["marker"]),
                turns=tuple(_line(line) for line in part["turns"]),
                after=None if part.get("after") is None else _line(part["after"]),
            )
            for part in body["parts"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise HttpError(400, f"this is no script: {error!r}") from error
    return Script(parts, folder)


def _line(value: Any) -> Line:
    return Line(value) if isinstance(value, str) else Line(**value)


def _split(ids: list[int], opening: list[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    place = 0
    while place < len(ids):
        if ids[place : place + len(opening)] == opening:
            pieces.append([])
            place += len(opening)
        else:
            pieces[-1].append(ids[place])
            place += 1
    return pieces
