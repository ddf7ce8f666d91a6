"""What one rendering of a template may cost: steps, characters that it makes, and time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_OUTPUT_CHARACTERS = 2_000_000
# All that is made on the way to the output, each intermediate text or list on its own.
MAX_MADE_CHARACTERS = 10 * MAX_OUTPUT_CHARACTERS
MAX_STEPS = 50_000
MAX_SECONDS = 2.0
ELEMENT = 8  # characters that an element of a list counts as, beside its own


class Meter:
    """Count what one rendering does; every method raises SecurityError beyond a bound."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._made = MAX_MADE_CHARACTERS
        self._said = MAX_OUTPUT_CHARACTERS
        self._until = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Count one step of a loop, one call or one filter."""
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if time.thread_time() > self._until:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, characters: int) -> None:
        """Count what is about to be made."""
        self._made -= characters
        if characters > MAX_OUTPUT_CHARACTERS or self._made < 0:
            raise SecurityError(f"it makes more than {MAX_MADE_CHARACTERS} characters")

    def say(self, characters: int) -> None:
        """Count what is said, in the end or as a text to go on with."""
        self._said -= characters
        if self._said < 0:
            raise SecurityError(f"it says more than {MAX_OUTPUT_CHARACTERS} characters")

    def counted(self, values: Any) -> Iterator[Any]:
        """Give the values of an iterable, each as a step."""
        for value in values:
            self.step()
            yield value


current: ContextVar[Meter] = ContextVar("meter")


def size(value: Any) -> int:
    """Return about how many characters a value has as text; raise SecurityError for too many.

    A list that holds the same text a thousand times has it a thousand times.
    """
    total = 0
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, int):
            total += 1 + each.bit_length() // 3
        elif isinstance(each, Namespace):
            pending.append(each._Namespace__attrs)
        elif isinstance(each, Mapping):
            total += ELEMENT * (1 + len(each))
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            total += ELEMENT * (1 + len(each))
            pending += each
        elif isinstance(each, range):
            total += ELEMENT * len(each)
        else:
            total += ELEMENT
        if total > MAX_OUTPUT_CHARACTERS:
            raise SecurityError(f"it makes more than {MAX_OUTPUT_CHARACTERS} characters at once")
    return total
