"""What an evaluator is given, what it answers and how it fails."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

JsonMap = Mapping[str, Any]

MAX_REWARDS = 1_000
MAX_NAME_CHARACTERS = 200
MAX_DETAILS_BYTES = 64 * 1024
MAX_LOG_CHARACTERS = 100_000
MAX_TURN_REWARDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program that a phase of a grading runs, without a shell.

    `seconds` is its own time limit, None: what is left of the grading's. `output_bytes` caps each
    of its two streams; head and tail are kept.
    """

    argv: tuple[str, ...]
    stdin: bytes = b""
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    output_bytes: int = 256 * 1024


WHOLE = ("/",)


class Base(StrEnum):
    """Say what a phase's fresh sandbox starts on."""

    AGENT = "agent"  # what the agent left
    PREPARED = "prepared"  # what the setups left: nothing of the agent's is in it


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One fresh sandbox of a grading: what is put into it, run in it and taken out of it.

    `workspace` are the folders that an AGENT phase takes from what the agent left: all else is as
    the setups left it, so that no program of the agent's is run as one of the system's. Empty: the
    environment's working directory; `WHOLE`: everything.

    `files` map absolute paths to bytes and permission bits; the task's hidden tests are put under
    `/tests` where `tests` says so. `commands` run one after the other; one that fails or runs out
    of its own seconds does not stop the next. `collect` maps absolute paths to the most bytes
    that are read of each; of one that ends in `/`, a folder, a tar archive is taken. Of `log` the
    end is collected, even when a command uses up the grading's time. `network` asks for a network,
    which the environment must grant.
    """

    name: str
    base: Base = Base.AGENT
    workspace: tuple[str, ...] = ()
    files: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)
    tests: bool = False
    commands: tuple[Command, ...] = ()
    collect: Mapping[str, int] = field(default_factory=dict)
    log: str = ""
    network: bool = False


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a command; `exit_code` is None when it was ended at its time limit."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """What a phase left: its commands in order, and what was collected, None where it was not.

    A collected file that is too large, or no plain file, is b"".
    """

    name: str
    commands: tuple[Ran, ...] = ()
    files: Mapping[str, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Artefacts:
    """Hold what a finished rollout left behind for its evaluator.

    `answer` is what the agent submitted, None when it never did. `messages` is the whole
    conversation as the trajectory tells it, in the OpenAI form. `turns` and `tokens` count what
    the policy did and sampled, `stop_reason` says why it stopped. `phases` are what the
    evaluator's own phases left so far, in order.
    """

    answer: str | None = None
    last_message: str = ""
    messages: tuple[JsonMap, ...] = ()
    turns: int = 0
    tokens: int = 0
    stop_reason: str = ""
    instruction: str = ""
    phases: tuple[PhaseResult, ...] = ()

    def phase(self, name: str) -> PhaseResult | None:
        """Return what the phase of that name left; None while it has not run."""
        return next((each for each in self.phases if each.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Score:
    """Hold one evaluation: the scalar, the named rewards behind it, JSON details and a log.

    `turn_rewards` are the rewards of the policy's turns in order, None where a turn has none;
    () says nothing of turns. Raises `RewardMalformed` for what is not finite, flat, JSON or small
    enough; of a long log the end is kept.
    """

    reward: float
    rewards: Mapping[str, float]
    details: JsonMap = field(default_factory=dict)
    log: str = ""
    turn_rewards: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", self.log[-MAX_LOG_CHARACTERS:])
        object.__setattr__(self, "turn_rewards", tuple(self.turn_rewards))
        _check_names(self.rewards)
        for name, value in {**self.rewards, "reward": self.reward}.items():
            _check_number(value, f"the reward {name!r}")
        if len(self.turn_rewards) > MAX_TURN_REWARDS:
            raise RewardMalformed(f"there are more than {MAX_TURN_REWARDS} rewards of turns")
        for turn, earned in enumerate(self.turn_rewards):
            if earned is not None:
                _check_number(earned, f"the reward of turn {turn}")
        _check_details(self.details)


def _check_names(rewards: Mapping[str, float]) -> None:
    if len(rewards) > MAX_REWARDS:
        raise RewardMalformed(f"there are {len(rewards)} named rewards, more than {MAX_REWARDS}")
    for name in rewards:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise RewardMalformed(
                f"a reward is named {str(name)[:50]!r}; names are texts of 1 to "
                f"{MAX_NAME_CHARACTERS} characters"
            )


def _check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardMalformed(f"{what} is {str(value)[:50]!r}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise RewardMalformed(f"{what} is too large") from error
    if not math.isfinite(number):
        raise RewardMalformed(f"{what} is {number}, not a finite number")


def _check_details(details: JsonMap) -> None:
    try:
        size = len(json.dumps(dict(details), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardMalformed(f"the details of the score are not JSON: {error}") from error
    if size > MAX_DETAILS_BYTES:
        raise RewardMalformed(
            f"the details of the score have {size} bytes, more than {MAX_DETAILS_BYTES}; "
            "say less, or say it in the log"
        )


class EvaluatorFault(Exception):
    """Say that no reward could be made; `code` is stable, the message says what to do.

    `is_graders` says that nothing of the policy's can have brought it about: it is never charged
    to the policy, whatever a second grading would find.
    """

    code: ClassVar[str] = "evaluator.fault"
    is_graders: ClassVar[bool] = False

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
    is_graders = True


class JudgeUnavailable(EvaluatorFault):
    """Say that the judge's server gave no answer, which no policy can have brought about."""

    code = "evaluator.judge_unavailable"
    is_graders = True


class JudgeRefused(EvaluatorFault):
    """Say that the judge's server refused the request, which what it was to judge may cause."""

    code = "evaluator.judge_refused"


class JudgeAbstained(EvaluatorFault):
    """Say that the judge's votes are too few, unreadable or not agreed enough for a verdict."""

    code = "evaluator.judge_abstained"


class Evaluator(ABC):
    """Score artefacts as a pure function: no database, no sandbox, no clock, no network."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_sandbox: ClassVar[bool]
    needs_messages: ClassVar[bool] = False  # whether `score` reads the whole conversation
    version: ClassVar[str] = "1"  # raised when the same artefacts may score otherwise

    @abstractmethod
    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Raise `InvalidSettings` for the first field that `score` could not work with."""

    def next_phase(
        self,
        settings: JsonMap,  # noqa: ARG002
        payload: JsonMap,  # noqa: ARG002
        artefacts: Artefacts,  # noqa: ARG002
    ) -> Phase | None:
        """Return the sandbox to run next, by what earlier ones left; None: there is none."""
        return None

    def wants_sandbox(self, settings: JsonMap) -> bool:  # noqa: ARG002
        """Tell whether a grading with these settings runs phases."""
        return self.needs_sandbox

    def wants_messages(self, settings: JsonMap) -> bool:  # noqa: ARG002
        """Tell whether `score` with these settings reads the whole conversation."""
        return self.needs_messages

    def sample_payload(self, settings: JsonMap) -> JsonMap:
        """Return a small payload to validate settings with where no task is at hand."""
        return {"answer": "A"} if "pattern" in settings else {"answer": "A", "pattern": "()"}

    def reference_answer(
        self,
        settings: JsonMap,  # noqa: ARG002
        payload: JsonMap,  # noqa: ARG002
    ) -> str | None:
        """Return an answer that earns the full reward, for verifications; None: none is known."""
        return None

    @abstractmethod
    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Score the artefacts; raise an `EvaluatorFault` when no reward can be made."""
