"""Typed sampling parameters and budgets of an experiment, with their defaults and bounds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rollouts.exceptions import InvalidValue

EVAL_OVERHEAD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class _Options:
    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Return the options with defaults filled in. Raises InvalidValue."""
        if not isinstance(values, Mapping):
            raise InvalidValue(f"{cls.__name__.lower()} must be an object.")
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise InvalidValue(
                f"Unknown {cls.__name__.lower()} key {unknown[0]!r}; known: {', '.join(known)}."
            )
        clean: dict[str, Any] = {}
        for name, value in values.items():
            low, high, whole = cls.bounds()[name]
            if value is None and known[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidValue(f"{name} must be a number, not {value!r}.")
            if not abs(value) < math.inf or not low <= value <= high:
                raise InvalidValue(f"{name} must be between {low:g} and {high:g}, not {value}.")
            if whole and int(value) != value:
                raise InvalidValue(f"{name} must be a whole number, not {value}.")
            clean[name] = int(value) if whole else float(value)
        return cls(**clean)

    @classmethod
    def stored(cls, values: Any) -> Self:
        """Return stored options as far as this release knows them; never raises.

        Another release may have written keys or values that this one does not accept; a row must
        not stop the dispatcher for that.
        """
        known: dict[str, Any] = {}
        for name, value in values.items() if isinstance(values, Mapping) else ():
            try:
                cls.parse({name: value})
            except InvalidValue:
                continue
            known[name] = value
        return cls.parse(known)

    @classmethod
    def bounds(cls) -> dict[str, tuple[float, float, bool]]:
        """Return lowest value, highest value and whether it is whole, by name."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sampling(_Options):
    """How tokens are sampled; `max_tokens` is per turn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    seed: int | None = None

    @classmethod
    def bounds(cls) -> dict[str, tuple[float, float, bool]]:
        """Return the bounds by name."""
        return {
            "temperature": (0.0, 10.0, False),
            "top_p": (1e-6, 1.0, False),
            "top_k": (-1, 1_000_000, True),
            "max_tokens": (1, 1_000_000, True),
            "seed": (0, 2**62, True),
        }


@dataclass(frozen=True, kw_only=True)
class Budgets(_Options):
    """Limits of one rollout; seconds count time in the stage, never in a queue."""

    max_turns: int = 30
    max_sampled_tokens: int = 32768
    tool_seconds: float = 60.0
    init_seconds: float = 180.0
    run_seconds: float = 1800.0
    eval_seconds: float = 600.0
    inference_wait_seconds: float = 300.0
    max_tool_seconds: float | None = None

    @classmethod
    def bounds(cls) -> dict[str, tuple[float, float, bool]]:
        """Return the bounds by name."""
        return {
            "max_turns": (1, 10_000, True),
            "max_sampled_tokens": (1, 100_000_000, True),
            "tool_seconds": (0.1, 86_400, False),
            "init_seconds": (1, 86_400, False),
            "run_seconds": (1, 86_400, False),
            "eval_seconds": (1, 86_400, False),
            "inference_wait_seconds": (0.1, 86_400, False),
            "max_tool_seconds": (0.1, 86_400, False),
        }

    def of_stage(self, stage: str) -> float:
        """Return the seconds that a stage may take."""
        return {
            "init": self.init_seconds,
            "run": self.run_seconds + self.inference_wait_seconds,
            # Grading may run twice: on what the agent left, and on the untouched sandbox.
            "eval": 2 * self.eval_seconds + EVAL_OVERHEAD_SECONDS,
        }[stage]
