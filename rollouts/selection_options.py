"""Typed settings of what reaches a trainer: the selection of groups, and the filters' rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rollouts.exceptions import InvalidValue
from rollouts.filters.base import GroupFilter, InvalidFilter
from rollouts.filters.registry import make_rule
from rollouts.filters.rules import complete_needed
from rollouts.states import Feed

START, FINISHED = "start", "finished"
CARRY_OVER, CANCEL = "carry_over", "cancel"
MAX_FILTERS = 16
MAX_REPLACEMENTS = 1024
MAX_DEADLINE_SECONDS = 7 * 86_400.0

_CHOICES = {"order": (START, FINISHED), "unfinished": (CARRY_OVER, CANCEL)}
# Lowest value, highest value, whether it is whole, whether null is a value.
_BOUNDS = {
    "replace_failed": (0, MAX_REPLACEMENTS, True, False),
    "group_deadline_seconds": (1, MAX_DEADLINE_SECONDS, False, True),
    "min_complete_fraction": (0.0, 1.0, False, True),
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which finished groups make a batch, and what becomes of those that cannot.

    order: `start`, as they were started, so that long episodes are as frequent as they should be;
    or `finished`, as they end. unfinished: what becomes of open groups once a batch is full.
    replace_failed: how many failed samples of a group are sampled anew. group_deadline_seconds:
    from the group's start; null: none. min_complete_fraction: of the group's size, scored; null:
    all of it when the tasks are pulled, none when the groups were pushed, whose sender hears of
    each.
    """

    order: str = START
    unfinished: str = CARRY_OVER
    replace_failed: int = 0
    group_deadline_seconds: float | None = None
    min_complete_fraction: float | None = None

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Return the settings with defaults filled in. Raises InvalidValue."""
        if not isinstance(values, Mapping):
            raise InvalidValue("selection must be an object.")
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(map(str, values)) - set(names))
        if unknown:
            raise InvalidValue(f"Unknown selection key {unknown[0]!r}; known: {', '.join(names)}.")
        return cls(**{name: _checked(name, value) for name, value in values.items()})

    @classmethod
    def stored(cls, values: Any) -> Self:
        """Return stored settings as far as this release knows them; never raises."""
        known: dict[str, Any] = {}
        for name, value in values.items() if isinstance(values, Mapping) else ():
            try:
                cls.parse({name: value})
            except InvalidValue:
                continue
            known[name] = value
        return cls.parse(known)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return asdict(self)

    def complete_needed(self, *, size: int, feed: str) -> int:
        """Return how many of a group's samples must be scored for it to reach the trainer."""
        fraction = self.min_complete_fraction
        if fraction is None:
            fraction = 1.0 if feed == Feed.PULL else 0.0
        return complete_needed(fraction, size)


@dataclass(frozen=True)
class Accuracy:
    """Which named reward says whether a sample is right, and from where on."""

    key: str = "reward"
    threshold: float = 1.0


def parse_filters(values: Any) -> list[dict[str, Any]]:
    """Return the rules as they are stored, defaults filled in. Raises InvalidValue."""
    return [rule.stored() for rule in _rules(values)]


def stored_filters(values: Any) -> tuple[tuple[GroupFilter, ...], tuple[str, ...]]:
    """Return the rules of stored filters, and what is wrong with those left out; never raises.

    A plug-in may be missing in this process: a group must not be held up for that.
    """
    rules: list[GroupFilter] = []
    faults: list[str] = []
    for entry in values if isinstance(values, Sequence) and not isinstance(values, str) else ():
        try:
            rules.append(make_rule(entry))
        except InvalidFilter as fault:
            faults.append(str(fault))
    return tuple(rules), tuple(faults)


def accuracy_of(values: Any) -> Accuracy:
    """Return what is right by stored filters: the first one's key and threshold that has a key."""
    for rule in stored_filters(values)[0]:
        key = getattr(rule, "key", None)
        if isinstance(key, str):
            return Accuracy(key=key, threshold=float(getattr(rule, "threshold", 1.0)))
    return Accuracy()


def _rules(values: Any) -> list[GroupFilter]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InvalidValue('filters must be a list such as [{"rule": "no_variance"}].')
    if len(values) > MAX_FILTERS:
        raise InvalidValue(f"Give at most {MAX_FILTERS} filters, not {len(values)}.")
    rules = []
    for place, entry in enumerate(values):
        try:
            rules.append(make_rule(entry))
        except InvalidFilter as fault:
            raise InvalidValue(f"filters[{place}]: {fault}") from None
    return rules


def _checked(name: str, value: Any) -> Any:
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise InvalidValue(f"{name} must be {' or '.join(_CHOICES[name])}, not {value!r}.")
        return value
    low, high, whole, nullable = _BOUNDS[name]
    if value is None and nullable:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(f"{name} must be a number, not {value!r}.")
    if not abs(value) < math.inf or not low <= value <= high:
        raise InvalidValue(f"{name} must be between {low:g} and {high:g}, not {value}.")
    if whole and int(value) != value:
        raise InvalidValue(f"{name} must be a whole number, not {value}.")
    return int(value) if whole else float(value)
