"""What an evaluator is given, what it answers and how it fails."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

JsonMap = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """Hold what a finished rollout left behind for its evaluator.

    `answer` is what the agent submitted, None when it never did. The reward files are the raw
    bytes found under `/logs/verifier/`, None when absent. `exit_code` is the test script's.
    """

    answer: str | None = None
    last_message: str = ""
    reward_json: bytes | None = None
    reward_txt: bytes | None = None
    test_log: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Score:
    """Hold one evaluation: the scalar, the named rewards behind it, JSON details and a log."""

    reward: float
    rewards: Mapping[str, float]
    details: JsonMap = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.rewards}.items():
            if not math.isfinite(value):
                raise RewardMalformed(f"the reward {name!r} is {value}, not a finite number")


class EvaluatorFault(Exception):
    """Say that no reward could be made; `code` is stable, the message says what to do."""

    code: ClassVar[str] = "evaluator.fault"

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class RewardMissing(EvaluatorFault):
    """Say that the test script left no reward file."""

    code = "evaluator.reward_missing"


class RewardMalformed(EvaluatorFault):
    """Say that a reward file or value cannot be read as finite numbers."""

    code = "evaluator.reward_malformed"


class RewardOutOfRange(EvaluatorFault):
    """Say that a reward lies outside the range that the settings declare."""

    code = "evaluator.reward_out_of_range"


class EvaluatorTimeout(EvaluatorFault):
    """Say that the evaluator was killed because its time ran out."""

    code = "evaluator.timeout"


class UnknownEvaluator(EvaluatorFault):
    """Say that no evaluator has this name."""

    code = "evaluator.unknown"


class EvaluatorCancelled(EvaluatorFault):
    """Say that the evaluator was killed because its rollout was cancelled."""

    code = "evaluator.cancelled"


class EvaluatorCrashed(EvaluatorFault):
    """Say that the evaluator's process died or answered nonsense."""

    code = "evaluator.crashed"


class InvalidSettings(EvaluatorFault):
    """Say which setting or payload field of an evaluator is wrong and what it should be."""

    code = "evaluator.settings_invalid"


class Evaluator(ABC):
    """Score artefacts as a pure function: no database, no sandbox, no clock, no network."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_sandbox: ClassVar[bool]

    @abstractmethod
    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Raise `InvalidSettings` for the first field that `score` could not work with."""

    @abstractmethod
    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Score the artefacts; raise an `EvaluatorFault` when no reward can be made."""
