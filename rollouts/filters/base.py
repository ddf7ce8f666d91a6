"""What a rule is given, what it answers, and how its settings are read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

MAX_KEY = 64


class InvalidFilter(ValueError):
    """A rule is not known, or its settings are wrong; the message says what they should be."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One finished rollout of a group; those that were replaced are not among them."""

    number: int
    outcome: str
    stop_reason: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    turns: int = 0
    sampled_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None

    @property
    def complete(self) -> bool:
        """Tell whether it was scored."""
        return self.outcome == "scored"

    def value(self, key: str) -> float | None:
        """Return a named reward; `reward` is the one that the trainer gets. None: it has none."""
        value = self.reward if key == "reward" else self.rewards.get(key)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A group whose samples are all done; `size` is how many were asked for."""

    size: int
    samples: tuple[Sample, ...]
    task_ref: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> tuple[Sample, ...]:
        """Return the samples that were scored."""
        return tuple(sample for sample in self.samples if sample.complete)

    def values(self, key: str) -> list[float]:
        """Return a named reward of the scored samples; those without it are left out."""
        found = (sample.value(key) for sample in self.complete)
        return [value for value in found if value is not None]


class GroupFilter(ABC):
    """A rule: a frozen dataclass whose fields are its settings.

    It is asked once for each finished group, inside the transaction that ends the last sample: it
    must be quick, and it must not touch the database or the network.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    judges_task: ClassVar[bool] = True
    """Whether a refusal says something of the task: then it is used up for the epoch of the feed;
    else it is drawn again."""

    @abstractmethod
    def refuse(self, group: FinishedGroup) -> str | None:
        """Say in words why the group is of no use, or return None when it is."""

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the rule with these settings. Raises InvalidFilter."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            names = ", ".join(known) or "none"
            raise InvalidFilter(f"{cls.name}: unknown setting {unknown[0]!r}; known: {names}.")
        try:
            return cls(**settings)
        except TypeError as error:
            raise InvalidFilter(f"{cls.name}: {error}.") from None

    def stored(self) -> dict[str, Any]:
        """Return the rule as it is stored and shown, defaults filled in."""
        return {"rule": self.name, **asdict(self)}  # type: ignore[call-overload]
