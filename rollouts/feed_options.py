"""Typed settings of the feed: how an experiment draws from its task sets, and how it is paced."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from rollouts.exceptions import InvalidValue

MAX_BATCH_GROUPS = 4096  # what one batch can hold
MAX_IN_FLIGHT = 16_384
MAX_SKIPPED = 10_000
MAX_WEIGHTS = 1000
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 100.0


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Leave out tasks that are solved too often or too seldom, once enough samples say so.

    A task whose pass rate is outside of low..high is drawn again `revisit_epochs` after the epoch
    in which it was drawn last: the policy has changed since.
    """

    low: float = 0.0
    high: float = 1.0
    min_samples: int = 8
    revisit_epochs: int = 4

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Return the settings with defaults filled in. Raises InvalidValue."""
        if not isinstance(values, Mapping):
            raise InvalidValue("curriculum must be an object or null.")
        _refuse_unknown("curriculum", values, [each.name for each in fields(cls)])
        clean: dict[str, Any] = {}
        for name, value in values.items():
            if name in ("low", "high"):
                clean[name] = _number(f"curriculum.{name}", value, 0.0, 1.0)
            else:
                clean[name] = _whole(f"curriculum.{name}", value, 1, 1_000_000)
        made = cls(**clean)
        if made.low > made.high:
            raise InvalidValue(
                f"curriculum.low must not be above curriculum.high, but {made.low:g} is above "
                f"{made.high:g}."
            )
        return made


@dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """How an experiment is fed.

    batch_groups: groups of the trainer's batch, or what all its ranks take in one step.
    groups_in_flight: how many are kept open or ready; null: two batches, one at lag 0.
    seed, shuffle: the order of an epoch. epochs: how often to go through the tasks; null: for ever.
    weights: by the name of a task set, how often each of its tasks comes in an epoch (default 1).
    skip: tasks that are not drawn, by reference or id. skip_flaky: nor are those that scored
    differently when a verification repeated them.
    """

    batch_groups: int | None = None
    groups_in_flight: int | None = None
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    curriculum: Curriculum | None = None
    skip: tuple[str, ...] = ()
    skip_flaky: bool = False

    @classmethod
    def parse(cls, values: Any) -> Self:
        """Return the settings with defaults filled in. Raises InvalidValue."""
        if not isinstance(values, Mapping):
            raise InvalidValue("feed_settings must be an object.")
        _refuse_unknown("feed_settings", values, [each.name for each in fields(cls)])
        return cls(**{name: _PARSERS[name](value) for name, value in values.items()})

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
        """Return all settings by name, as JSON."""
        return {**asdict(self), "weights": dict(self.weights), "skip": list(self.skip)}

    def target(self, *, max_policy_lag: int | None) -> int:
        """Return how many groups to keep open or ready."""
        if self.groups_in_flight is not None:
            return self.groups_in_flight
        return (self.batch_groups or 1) * (1 if max_policy_lag == 0 else 2)

    def check_for_pull(self) -> None:
        """Refuse what cannot feed. Raises InvalidValue."""
        if self.batch_groups is None:
            raise InvalidValue(
                "feed_settings.batch_groups is needed to pull: how many groups the trainer's "
                "batch has."
            )
        if self.groups_in_flight is not None and self.groups_in_flight < self.batch_groups:
            raise InvalidValue(
                f"feed_settings.groups_in_flight is {self.groups_in_flight}: a batch of "
                f"{self.batch_groups} groups would never be full."
            )


def _refuse_unknown(name: str, values: Mapping[Any, Any], known: list[str]) -> None:
    unknown = sorted(set(map(str, values)) - set(known))
    if unknown:
        raise InvalidValue(f"Unknown {name} key {unknown[0]!r}; known: {', '.join(known)}.")


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise InvalidValue(f"{name} must be a number, not {value!r}.")
    if not low <= value <= high:
        raise InvalidValue(f"{name} must be between {low:g} and {high:g}, not {value}.")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(f"{name} must be a whole number, not {value!r}.")
    if not abs(value) < math.inf or int(value) != value:
        raise InvalidValue(f"{name} must be a whole number, not {value}.")
    if not low <= value <= high:
        raise InvalidValue(f"{name} must be between {low} and {high}, not {value}.")
    return int(value)


def _whole_or_null(name: str, low: int, high: int) -> Any:
    return lambda value: None if value is None else _whole(name, value, low, high)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidValue(f"{name} must be true or false, not {value!r}.")
    return value


def _weights(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_WEIGHTS:
        raise InvalidValue(
            f"feed_settings.weights must be an object of at most {MAX_WEIGHTS} numbers by the name "
            "of a task set."
        )
    return {
        str(name): _number(f"feed_settings.weights[{name!r}]", weight, LEAST_WEIGHT, MOST_WEIGHT)
        for name, weight in value.items()
    }


def _skip(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, list | tuple) and len(value) <= MAX_SKIPPED
    if not listed or not all(isinstance(each, str) and _is_plain(each) for each in value):
        raise InvalidValue(
            f"feed_settings.skip must be a list of at most {MAX_SKIPPED} tasks' references or ids."
        )
    return tuple(dict.fromkeys(value))


def _is_plain(ref: str) -> bool:
    """Tell whether this can be a task's reference: short, and what the database takes as text."""
    return 0 < len(ref) <= 200 and "\0" not in ref and ref.isascii() | ref.isprintable()


_PARSERS: dict[str, Any] = {
    "batch_groups": _whole_or_null("feed_settings.batch_groups", 1, MAX_BATCH_GROUPS),
    "groups_in_flight": _whole_or_null("feed_settings.groups_in_flight", 1, MAX_IN_FLIGHT),
    "seed": lambda value: _whole("feed_settings.seed", value, 0, 2**62),
    "shuffle": lambda value: _flag("feed_settings.shuffle", value),
    "epochs": _whole_or_null("feed_settings.epochs", 1, 1_000_000),
    "weights": _weights,
    "curriculum": lambda value: None if value is None else Curriculum.parse(value),
    "skip": _skip,
    "skip_flaky": lambda value: _flag("feed_settings.skip_flaky", value),
}
