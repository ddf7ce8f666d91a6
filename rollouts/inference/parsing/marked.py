"""The text of sampled ids that remembers which of it was a control token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.inference.tokenizer_folder import ControlToken, TokenizerFolder


@dataclass(frozen=True, slots=True)
class Mark:
    """Say where one control token stands in the text."""

    start: int
    end: int
    token: ControlToken


class MarkedText:
    """Hold decoded ids. A mark that the vocabulary has as a token is found as a token only.

    So a `</tool_call>` which a policy spelled inside a string in ordinary tokens ends nothing.
    """

    def __init__(self, folder: TokenizerFolder, ids: Sequence[int]) -> None:
        self._control = {token.text for token in folder.control}
        by_id = {token.id: token for token in folder.control}
        pieces: list[str] = []
        marks: list[Mark] = []
        length = 0
        plain: list[int] = []
        for number in [*ids, None]:
            token = None if number is None else by_id.get(number)
            if number is not None and token is None:
                plain.append(number)
                continue
            if plain:
                pieces.append(folder.decode(plain, skip_special=False))
                length += len(pieces[-1])
                plain = []
            if token is not None:
                pieces.append(token.text)
                marks.append(Mark(length, length + len(token.text), token))
                length += len(token.text)
        self.text = "".join(pieces)
        # In order, so that finding the next of thousands takes no walk along all of them.
        self._special = [mark for mark in marks if mark.token.special]
        self._starts: dict[str, list[int]] = {}
        for mark in marks:
            self._starts.setdefault(mark.token.text, []).append(mark.start)

    def find(self, mark: str, start: int = 0, end: int | None = None) -> tuple[int, int] | None:
        """Return where the next `mark` begins and ends within `start` and `end`, or None."""
        end = len(self.text) if end is None else end
        if mark in self._control:
            return self.find_token(mark, start, end)
        place = self.text.find(mark, start, end)
        return None if place < 0 else (place, place + len(mark))

    def find_token(
        self, mark: str, start: int = 0, end: int | None = None
    ) -> tuple[int, int] | None:
        """Return where the next `mark` that is a token begins and ends, or None."""
        end = len(self.text) if end is None else end
        starts = self._starts.get(mark, [])
        place = bisect_left(starts, start)
        if place == len(starts) or starts[place] + len(mark) > end:
            return None
        return starts[place], starts[place] + len(mark)

    def plain(self, start: int = 0, end: int | None = None) -> str:
        """Return the text between, special tokens left out."""
        end = len(self.text) if end is None else end
        pieces, position = [], start
        first = bisect_left(self._special, start, key=lambda mark: mark.start)
        last = bisect_left(self._special, end, lo=first, key=lambda mark: mark.start)
        for mark in self._special[first:last]:
            if mark.end <= end:
                pieces.append(self.text[position : mark.start])
                position = mark.end
        return "".join(pieces) + self.text[position:end]
