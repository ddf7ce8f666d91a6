"""The built-in rules."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rollouts.filters.base import MAX_KEY, FinishedGroup, GroupFilter, InvalidFilter


@dataclass(frozen=True, kw_only=True)
class NoVariance(GroupFilter):
    """Refuse groups whose samples all have the same accuracy: their advantages are 0.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2), there by accuracy and not by the
    shaped reward. Equality is exact: a variance computed in floating point of equal numbers is not.
    """

    name: ClassVar[str] = "no_variance"
    description: ClassVar[str] = "all complete samples have the same value of the key"
    key: str = "reward"

    def __post_init__(self) -> None:
        _check_key(self)

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse when fewer than two values are known, or all are equal."""
        values = group.values(self.key)
        if len(values) < 2:
            return f"{len(values)} of {group.size} samples have a {self.key}"
        if min(values) == max(values):
            return f"{self.key} is {values[0]:g} in all {len(values)} samples"
        return None


@dataclass(frozen=True, kw_only=True)
class AllWrong(GroupFilter):
    """Refuse groups in which no sample reached the threshold."""

    name: ClassVar[str] = "all_wrong"
    description: ClassVar[str] = "the key is below the threshold in all complete samples"
    key: str = "reward"
    threshold: float = 1.0

    def __post_init__(self) -> None:
        _check_key(self)
        _check_number(self, "threshold")

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse when values are known and all are below the threshold."""
        values = group.values(self.key)
        if values and max(values) < self.threshold:
            return f"the best {self.key} of {len(values)} samples is {max(values):g}"
        return None


@dataclass(frozen=True, kw_only=True)
class AllRight(GroupFilter):
    """Refuse groups in which every sample reached the threshold."""

    name: ClassVar[str] = "all_right"
    description: ClassVar[str] = "the key reaches the threshold in all complete samples"
    key: str = "reward"
    threshold: float = 1.0

    def __post_init__(self) -> None:
        _check_key(self)
        _check_number(self, "threshold")

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse when values are known and all reach the threshold."""
        values = group.values(self.key)
        if values and min(values) >= self.threshold:
            return f"the worst {self.key} of {len(values)} samples is {min(values):g}"
        return None


@dataclass(frozen=True, kw_only=True)
class MinComplete(GroupFilter):
    """Refuse groups in which too few samples were scored: a fraction of the size, or a count."""

    name: ClassVar[str] = "min_complete"
    description: ClassVar[str] = "fewer samples than needed were scored"
    judges_task: ClassVar[bool] = False
    fraction: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.count is None):
            raise InvalidFilter(f"{self.name}: give either fraction or count.")
        if self.fraction is not None:
            _check_number(self, "fraction", low=0.0, high=1.0)
        if self.count is not None and (not _is_number(self.count) or int(self.count) != self.count):
            raise InvalidFilter(f"{self.name}: count must be a whole number, not {self.count!r}.")
        if self.count is not None and self.count < 1:
            raise InvalidFilter(f"{self.name}: count must be at least 1, not {self.count}.")

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse when fewer samples were scored; no group needs more than its size."""
        if self.fraction is not None:
            needed = complete_needed(self.fraction, group.size)
        else:
            needed = min(int(self.count or 0), group.size)
        if (complete := len(group.complete)) < needed:
            return f"{complete} of {group.size} samples are complete, {needed} are needed"
        return None


BUILT_IN = (NoVariance, AllWrong, AllRight, MinComplete)


def complete_needed(fraction: float, size: int) -> int:
    """Return how many of `size` samples a fraction asks for, rounded up; 0.1 of 30 is 3, not 4."""
    return math.ceil(round(fraction * size, 9))


def _check_key(rule: Any) -> None:
    if not isinstance(rule.key, str) or not 1 <= len(rule.key) <= MAX_KEY:
        raise InvalidFilter(
            f"{rule.name}: key must name a reward in 1 to {MAX_KEY} characters, not {rule.key!r}."
        )


def _check_number(rule: Any, name: str, low: float = -1e9, high: float = 1e9) -> None:
    value = getattr(rule, name)
    if not _is_number(value) or not low <= value <= high:
        raise InvalidFilter(
            f"{rule.name}: {name} must be a number from {low:g} to {high:g}, not {value!r}."
        )


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) < math.inf
