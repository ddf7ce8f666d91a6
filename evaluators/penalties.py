"""What a reward loses for many tokens and many turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evaluators.base import InvalidSettings, JsonMap
from evaluators.settings import read_count, read_number, refuse_unknown


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft punishment: from `max - buffer` tokens on it grows to `penalty` at `max`.

    https://arxiv.org/abs/2503.14476, equation 13.
    """

    most: int
    buffer: int
    penalty: float

    def of(self, tokens: int) -> float:
        """Return what is taken away, at most 0."""
        over = tokens - (self.most - self.buffer)
        if over <= 0:
            return 0.0
        if tokens >= self.most or not self.buffer:
            return -self.penalty
        return -self.penalty * over / self.buffer


@dataclass(frozen=True, kw_only=True)
class TurnPenalty:
    """What every turn beyond `free` costs, up to `most` in all."""

    free: int
    penalty: float
    most: float

    def of(self, turns: int) -> float:
        """Return what is taken away, at most 0."""
        return -min(self.most, self.penalty * max(0, turns - self.free))


def read_length(settings: JsonMap) -> Overlong | None:
    """Return the punishment that the setting `length` describes."""
    found = _part(settings, "length", {"max", "buffer", "penalty"})
    if found is None:
        return None
    most = read_count(found, "max", 0, least=1, most=10**9)
    return Overlong(
        most=most,
        buffer=read_count(found, "buffer", 0, least=0, most=most),
        penalty=_positive(found, "penalty", 1.0),
    )


def read_turns(settings: JsonMap) -> TurnPenalty | None:
    """Return the penalty that the setting `turns` describes."""
    found = _part(settings, "turns", {"free", "penalty", "max"})
    if found is None:
        return None
    return TurnPenalty(
        free=read_count(found, "free", 0, least=0, most=10**6),
        penalty=_positive(found, "penalty", 0.0),
        most=_positive(found, "max", 1.0),
    )


def _part(settings: JsonMap, name: str, known: set[str]) -> JsonMap | None:
    found = settings.get(name)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise InvalidSettings(f"setting {name!r} is {str(found)[:50]!r}; it must be an object")
    refuse_unknown(found, known, evaluator=f"composite {name}")
    return found


def _positive(settings: JsonMap, name: str, default: float) -> float:
    value = read_number(settings, name, default)
    if value < 0:
        raise InvalidSettings(f"setting {name!r} is {value:g}; write what is taken away, from 0")
    return value
