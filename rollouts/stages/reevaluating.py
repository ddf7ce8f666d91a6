"""Score what finished rollouts left again: some of a job's rollouts, then the job is given back."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from evaluators.base import Artefacts, EvaluatorCancelled, EvaluatorFault, PhaseResult, Score
from evaluators.registry import get_evaluator
from evaluators.runner import advance
from rollouts.exceptions import InfraFault, NotThere
from rollouts.models import Evaluation, Rollout
from rollouts.options import Budgets
from rollouts.services.artefacts import read_phases, rollout_artefacts, with_phase
from rollouts.services.grading_settings import settings_digest
from rollouts.services.reevaluations import (
    Holding,
    Rescored,
    give_reevaluation_back,
    has_urgent_work,
    keep_reevaluation,
    next_rollouts,
    settings_of,
    take_reevaluation,
    write_rescored,
)
from rollouts.services.secrets import evaluator_secrets, masked, replace_marks
from rollouts.stages.database import database
from rollouts.states import EvaluationSource

logger = logging.getLogger(__name__)

SLICE_SECONDS = 5.0
PAGE = 20
ITEM_SECONDS = 120.0
CANCEL_POLL_SECONDS = 1.0


class ArtefactsMissing(EvaluatorFault):
    """Say that an evaluator wants what was not kept of a rollout."""

    code = "reevaluation.artefacts_missing"


def carry_on(reevaluation_id: UUID) -> int:
    """Score some rollouts of a job again; return how many.

    One at least; no more while rollouts wait for EVAL, and none beyond a few seconds.
    """
    with database():
        holding = take_reevaluation(reevaluation_id=reevaluation_id, item_seconds=ITEM_SECONDS)
    if holding is None:
        return 0
    try:
        return _score_some(holding)
    finally:
        with database():
            give_reevaluation_back(holding=holding)


def _score_some(holding: Holding) -> int:
    end, count = time.monotonic() + SLICE_SECONDS, 0
    seconds = min(ITEM_SECONDS, Budgets.stored(holding.job.experiment.budgets).eval_seconds)
    while True:
        with database():
            page = next_rollouts(job=holding.job, count=PAGE)
        if not page:
            return count
        for rollout_id in page:
            with database():
                if not keep_reevaluation(holding=holding, item_seconds=ITEM_SECONDS):
                    return count
            try:
                found = _rescore(holding, rollout_id, seconds)
            except EvaluatorCancelled:
                return count
            with database():
                count += write_rescored(job=holding.job, rollout_id=rollout_id, found=found)
                urgent = has_urgent_work()
            if urgent or time.monotonic() >= end:
                return count


def _rescore(holding: Holding, rollout_id: UUID, seconds: float) -> Rescored:
    """Score one rollout again. Raises EvaluatorCancelled when the job was lost or cancelled."""
    job = holding.job
    with database():
        rollout = Rollout.objects.select_related(
            "group__task__task_set", "environment", "trajectory"
        ).get(pk=rollout_id)
        settings, payload = settings_of(job=job, rollout=rollout)
        kept = (
            Evaluation.objects.filter(rollout=rollout, source=EvaluationSource.ROLLOUT)
            .order_by("-created_at")
            .first()
        )
    blank = Rescored(
        evaluator=job.evaluator,
        evaluator_version="",
        settings_digest=settings_digest(settings),
    )
    secrets: dict[str, str] = {}
    try:
        evaluator = get_evaluator(job.evaluator)
        blank = replace(blank, evaluator_version=evaluator.version)
        try:
            wanted = evaluator.wants_messages(settings)
            given = rollout_artefacts(rollout=rollout, with_messages=wanted)
        except NotThere as lost:
            raise ArtefactsMissing(str(lost)) from lost
        with database():
            secrets = evaluator_secrets(
                settings,
                environment=job.environment or rollout.environment,
                task=rollout.group.task,
            )
        told = replace_marks(settings, secrets)
        score = _score(job.evaluator, told, payload, given, kept, seconds, _cancelled(holding))
    except EvaluatorCancelled:
        raise
    except (EvaluatorFault, InfraFault) as fault:
        said = masked([str(fault)[:2000], getattr(fault, "log", "")], secrets)
        return replace(blank, code=fault.code, details={"message": said[0]}, log=said[1])
    except Exception as error:  # one rollout must not hold up the others for ever
        logger.exception("rollout %s cannot be scored again", rollout_id)
        said = masked(f"{type(error).__name__}: {error}"[:2000], secrets)
        return replace(blank, code="reevaluation.crashed", details={"message": said})
    return replace(
        blank,
        reward=score.reward,
        rewards=score.rewards,
        turn_rewards=score.turn_rewards,
        details=masked(score.details, secrets),
        log=masked(score.log, secrets),
    )


def _score(
    evaluator: str,
    settings: dict[str, object],
    payload: dict[str, object],
    given: Artefacts,
    kept: Evaluation | None,
    seconds: float,
    cancelled: Callable[[], bool],
) -> Score:
    """Score, with the phases that the evaluator asks for taken from what was kept."""
    end = time.monotonic() + seconds
    phases: dict[str, PhaseResult] | None = None
    while True:
        wanted = advance(
            evaluator,
            settings,
            payload,
            given,
            timeout_seconds=max(0.1, end - time.monotonic()),
            cancelled=cancelled,
        )
        if isinstance(wanted, Score):
            return wanted
        if phases is None:
            phases = _kept_phases(kept)
        left = phases.pop(wanted.name, None)
        if left is None:
            raise ArtefactsMissing(
                f"evaluator {evaluator!r} wants the results of the sandbox {wanted.name!r}, which "
                "were not kept of this rollout, and a re-evaluation starts no sandbox: take new "
                "rollouts of its task, or an evaluator that judges what was kept"
            )
        given = with_phase(given, left)


def _kept_phases(kept: Evaluation | None) -> dict[str, PhaseResult]:
    if kept is None:
        return {}
    try:
        return {phase.name: phase for phase in read_phases(evaluation=kept)}
    except NotThere as lost:
        raise ArtefactsMissing(
            f"{lost} Take new rollouts of its task, or an evaluator that needs no sandbox."
        ) from lost


def _cancelled(holding: Holding) -> Callable[[], bool]:
    """Return what tells that the job was cancelled or lost, asked of the database now and then."""
    asked = time.monotonic()
    answer = False

    def cancelled() -> bool:
        nonlocal asked, answer
        if not answer and time.monotonic() - asked >= CANCEL_POLL_SECONDS:
            asked = time.monotonic()
            with database():
                answer = not keep_reevaluation(holding=holding, item_seconds=ITEM_SECONDS)
        return answer

    return cancelled
