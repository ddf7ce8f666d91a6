"""Samples, their medians, and rounds in which every way has its turn in random order."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Hold every sample of one way at one subject of one section."""

    section: str
    subject: str
    way: str
    unit: str
    values: tuple[float, ...]

    @property
    def key(self) -> Key:
        """Return what names this measure."""
        return self.section, self.subject, self.way

    @property
    def median(self) -> float:
        """Return the median of the samples."""
        return statistics.median(self.values)

    @property
    def p95(self) -> float:
        """Return the sample that 95 % of the samples do not exceed (nearest rank)."""
        ordered = sorted(self.values)
        return ordered[max(0, -(-95 * len(ordered) // 100) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary and the samples as JSON-able values."""
        return {
            "section": self.section,
            "subject": self.subject,
            "way": self.way,
            "unit": self.unit,
            "n": len(self.values),
            "median": round(self.median, 4),
            "p95": round(self.p95, 4),
            "values": [round(value, 4) for value in self.values],
        }


class Samples:
    """Collect samples of one section; `subjects` and `ways` only give the order of a table."""

    def __init__(
        self, section: str, *, subjects: Sequence[str] = (), ways: Sequence[str] = ()
    ) -> None:
        self._section = section
        self._subjects = {name: number for number, name in enumerate(subjects)}
        self._ways = {name: number for number, name in enumerate(ways)}
        self._units: dict[tuple[str, str], str] = {}
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, subject: str, way: str, value: float, unit: str = "ms") -> None:
        """Take one sample."""
        self._units.setdefault((subject, way), unit)
        self._values[subject, way].append(value)

    def time(self, subject: str, way: str, call: Callable[[], Item]) -> Item:
        """Take the wall time of one call in milliseconds; returns what the call returned."""
        began = time.perf_counter()
        result = call()
        self.add(subject, way, 1000 * (time.perf_counter() - began))
        return result

    def measures(self) -> list[Measure]:
        """Return one measure per subject and way that has samples, those unnamed last."""
        last = len(self._units)
        pairs = sorted(
            self._units,
            key=lambda pair: (self._ways.get(pair[1], last), self._subjects.get(pair[0], last)),
        )
        return [
            Measure(
                section=self._section,
                subject=subject,
                way=way,
                unit=self._units[subject, way],
                values=tuple(self._values[subject, way]),
            )
            for subject, way in pairs
        ]


def rounds(items: Sequence[Item], count: int, chance: random.Random) -> Iterator[tuple[int, Item]]:
    """Yield every item once a round, each round in a new random order.

    The noise of a shared machine then meets all ways alike.
    """
    order = list(items)
    for number in range(count):
        chance.shuffle(order)
        for item in order:
            yield number, item


def by_key(measures: Sequence[Measure]) -> Mapping[Key, Measure]:
    """Return the measures by section, subject and way."""
    return {measure.key: measure for measure in measures}
