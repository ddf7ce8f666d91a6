"""Finishing a stage: each is one transaction with one conditional update at its heart."""

from dataclasses import dataclass, field
from typing import Any

from django.db import transaction

from rollouts.exceptions import LeaseLost
from rollouts.models import Evaluation, Rollout, Trajectory
from rollouts.services.attempts import GIVEN_BACK, close_attempt, lock_rollout, open_attempt
from rollouts.services.claim import Claim
from rollouts.services.end import end_rollout
from rollouts.services.retry import after_fault
from rollouts.states import AttemptState, Event, Outcome, Stage, target
from rollouts.text import clean_json, clean_text
from sandboxes.services.lifecycle import reserve_sandbox
from sandboxes.services.snapshots import fail_requested
from sandboxes.states import SandboxPurpose


@dataclass(frozen=True, kw_only=True)
class StoredTrajectory:
    """A trajectory that is already on disk."""

    path: str
    size_bytes: int
    sha256: str
    segments: int
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    trainable: bool
    first_policy_version: int | None
    last_policy_version: int | None
    arrow_path: str = ""
    arrow_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredEvidence:
    """What an evaluator was given, that is already on disk."""

    path: str
    size_bytes: int
    sha256: str

    def columns(self) -> dict[str, Any]:
        """Return it as the columns of an evaluation."""
        return {f"evidence_{name}": value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What RUN leaves for EVAL and the trainer."""

    stop_reason: str
    answer: str | None
    last_message: str
    turns: int
    sampled_tokens: int
    tool_calls: int
    inference_seconds: float
    tool_seconds: float
    trajectory: StoredTrajectory


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What EVAL found."""

    evaluator: str
    reward: float
    rewards: dict[str, float]
    details: dict[str, Any]
    log: str
    evaluator_version: str = ""
    settings_digest: str = ""
    turn_rewards: list[float | None] = field(default_factory=list)
    evidence: StoredEvidence | None = None
    # Written anew with rewards of its turns; None: it stays as it is.
    trajectory: StoredTrajectory | None = None


def finish_init(*, claim: Claim) -> None:
    """Pass a rollout on to RUN. Raises LeaseLost."""
    with transaction.atomic():
        rollout = _advance(claim)
        open_attempt(
            rollout=rollout, stage=Stage.RUN, node=rollout.node if rollout.needs_sandbox else None
        )


def finish_run(*, claim: Claim, result: RunResult) -> None:
    """Store what RUN left and pass the rollout on to EVAL. Raises LeaseLost."""
    with transaction.atomic():
        rollout = _advance(
            claim,
            stop_reason=result.stop_reason,
            answer=None if result.answer is None else clean_text(result.answer),
            last_message=clean_text(result.last_message),
            turns=result.turns,
            sampled_tokens=result.sampled_tokens,
            tool_calls=result.tool_calls,
        )
        rollout.timings = {
            **rollout.timings,
            "inference": round(result.inference_seconds, 4),
            "tools": round(result.tool_seconds, 4),
        }
        rollout.save(update_fields=["timings"])
        stored = vars(result.trajectory)
        Trajectory.objects.bulk_create(  # one statement, where update_or_create takes five
            [Trajectory(rollout=rollout, **stored)],
            update_conflicts=True,
            unique_fields=["rollout"],
            update_fields=list(stored),
        )
        fail_requested(owners=[rollout.id], detail=f"The episode ended after {result.turns} turns.")
        node = rollout.node if rollout.needs_sandbox else None
        if node is not None:
            reserve_sandbox(owner=rollout.id, node=node, purpose=SandboxPurpose.GRADE)
        open_attempt(rollout=rollout, stage=Stage.EVAL, node=node)


def finish_eval(*, claim: Claim, result: EvalResult) -> None:
    """Write the score and end the rollout. Raises LeaseLost."""
    rewards = clean_json(result.rewards)
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        close_attempt(attempt_id=claim.attempt_id, token=claim.token, state=AttemptState.FINISHED)
        Evaluation.objects.create(
            rollout_id=claim.rollout_id,
            evaluator=result.evaluator,
            reward=result.reward,
            rewards=rewards,
            details=clean_json(result.details),
            log=clean_text(result.log),
            evaluator_version=result.evaluator_version,
            settings_digest=result.settings_digest,
            turn_rewards=result.turn_rewards,
            **({} if result.evidence is None else result.evidence.columns()),
        )
        if result.trajectory is not None:
            Trajectory.objects.filter(rollout_id=claim.rollout_id).update(**vars(result.trajectory))
        ended = end_rollout(
            rollout_id=claim.rollout_id,
            outcome=Outcome.SCORED,
            reward=result.reward,
            rewards=rewards,
            sweep=False,
        )
        if not ended:
            raise LeaseLost(f"rollout {claim.rollout_id} was done already")


def fail_attempt(
    *,
    claim: Claim,
    code: str,
    detail: str,
    retryable: bool = True,
    restart_from_init: bool = False,
    timed_out: bool = False,
) -> None:
    """Close an attempt as failed and write what follows. Raises LeaseLost."""
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        close_attempt(
            attempt_id=claim.attempt_id,
            token=claim.token,
            state=AttemptState.FAILED,
            code=code,
            detail=detail,
        )
        after_fault(
            rollout_id=claim.rollout_id,
            stage=claim.stage,
            code=code,
            detail=detail,
            retryable=retryable,
            restart_from_init=restart_from_init,
            timed_out=timed_out,
        )


def give_back(*, claim: Claim) -> None:
    """Give an attempt back because its worker ends; it does not count as a try.

    Raises LeaseLost.
    """
    detail = "The worker was shut down."
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        close_attempt(
            attempt_id=claim.attempt_id,
            token=claim.token,
            state=AttemptState.LOST,
            code=GIVEN_BACK,
            detail=detail,
        )
        after_fault(rollout_id=claim.rollout_id, stage=claim.stage, code=GIVEN_BACK, detail=detail)


def finish_cancelled(*, claim: Claim) -> None:
    """End the rollout of an attempt whose worker saw the cancel. Raises LeaseLost."""
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        close_attempt(attempt_id=claim.attempt_id, token=claim.token, state=AttemptState.CANCELLED)
        end_rollout(rollout_id=claim.rollout_id, outcome=Outcome.CANCELLED)


def drop_rollout(*, claim: Claim, code: str, detail: str) -> None:
    """End a rollout whose experiment does not want it any more. Raises LeaseLost."""
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        close_attempt(
            attempt_id=claim.attempt_id,
            token=claim.token,
            state=AttemptState.CANCELLED,
            code=code,
            detail=detail,
        )
        end_rollout(
            rollout_id=claim.rollout_id,
            outcome=Outcome.CANCELLED,
            failure_code=code,
            failure_detail=clean_text(detail)[:4000],
        )


def _advance(claim: Claim, **values: Any) -> Rollout:
    """Close the attempt and move the rollout one stage on, or raise LeaseLost."""
    lock_rollout(rollout_id=claim.rollout_id)
    close_attempt(attempt_id=claim.attempt_id, token=claim.token, state=AttemptState.FINISHED)
    following = target(claim.stage, Event.FINISH_STAGE)
    won = Rollout.objects.filter(pk=claim.rollout_id, state=claim.stage).update(
        state=following, **values
    )
    if not won:
        raise LeaseLost(f"rollout {claim.rollout_id} is no longer in {claim.stage}")
    return Rollout.objects.select_related("experiment", "node").get(pk=claim.rollout_id)
