"""Re-evaluations: begin one, hand out its work, write down what each scoring found.

A worker holds a job for a short while under a token and gives it back; what it did not reach, the
next one finds by the rows that are missing. Each rollout has at most one row of a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.db.models.functions import Now

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import Attempt, Evaluation, Experiment, Reevaluation, Rollout
from rollouts.services.grading_settings import grading_settings
from rollouts.services.messages import publish_reevaluation
from rollouts.states import EvaluationSource, ReevaluationState, Stage
from rollouts.text import clean_json, clean_text
from sandboxes.models import Environment

MAX_OPEN = 20  # of one experiment
LEASE_SECONDS = 30.0  # beyond what scoring one rollout may take


@dataclass(frozen=True)
class Holding:
    """A re-evaluation in the hands of a worker until it gives it back under the token."""

    job: Reevaluation
    token: UUID


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """What scoring one rollout again found; `reward` is None where `code` says why."""

    evaluator: str
    evaluator_version: str
    settings_digest: str
    reward: float | None = None
    rewards: Mapping[str, float] | None = None
    turn_rewards: tuple[float | None, ...] = ()
    details: Mapping[str, Any] | None = None
    log: str = ""
    code: str = ""


def begin_reevaluation(
    *,
    owner: Any,
    experiment: Experiment,
    evaluator: str | None = None,
    evaluator_settings: Mapping[str, Any] | None = None,
    environment: Environment | None = None,
) -> Reevaluation:
    """Have what an experiment's scored rollouts left scored by another evaluator.

    Their own rewards stay. Name the evaluator, or an environment whose evaluator it is; settings
    that are not given are the environment's, or those that each task has for this evaluator.
    Raises InvalidValue for an evaluator or settings that cannot be, and StateConflict while too
    many others are open.
    """
    if (evaluator is None) == (environment is None):
        raise InvalidValue("Name either an evaluator or an environment whose evaluator is meant.")
    if environment is not None:
        evaluator = environment.evaluator
        if evaluator_settings is None:
            evaluator_settings = environment.evaluator_settings
    assert evaluator is not None
    sample = _scored(experiment=experiment).select_related("group__task", "environment").first()
    if sample is None:
        raise InvalidValue("The experiment has no scored rollout yet.", code="reevaluation.empty")
    job = Reevaluation(
        owner=owner,
        experiment=experiment,
        evaluator=evaluator,
        evaluator_settings=None if evaluator_settings is None else dict(evaluator_settings),
        environment=environment,
    )
    try:
        settings, payload = settings_of(job=job, rollout=sample)
        get_evaluator(evaluator).validate(settings, payload)
    except EvaluatorFault as fault:
        raise InvalidValue(str(fault), code=fault.code) from None
    with transaction.atomic():
        Experiment.objects.select_for_update().only("pk").get(pk=experiment.pk)
        if Reevaluation.objects.open().filter(experiment=experiment).count() >= MAX_OPEN:
            raise StateConflict(
                f"{MAX_OPEN} re-evaluations of this experiment are open: wait or cancel one.",
                code="reevaluation.too_many",
            )
        job.save()
        publish_reevaluation(reevaluation_id=job.pk)
    return job


def settings_of(*, job: Reevaluation, rollout: Rollout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return by which settings and payload a rollout is scored again; its task is selected."""
    evaluator, settings, payload = grading_settings(
        environment=rollout.environment, task=rollout.group.task
    )
    if job.evaluator_settings is not None:
        # An environment's are defaults, as where its rollouts are scored: the task's own win.
        own = rollout.group.task.hidden if job.environment_id and evaluator == job.evaluator else {}
        return {**job.evaluator_settings, **own.get("evaluator_settings", {})}, payload
    return (settings if evaluator == job.evaluator else {}), payload


def cancel_reevaluation(*, job: Reevaluation) -> None:
    """Ask for the end of a job; what it scored stays. Raises StateConflict when it is over."""
    with transaction.atomic():
        wanted = Reevaluation.objects.open().filter(pk=job.pk)
        if not wanted.update(cancel_requested_at=Now()):
            raise StateConflict("The re-evaluation is over.", code="reevaluation.over")
        end_cancelled()


def end_cancelled() -> int:
    """End cancelled jobs that no worker holds; return how many."""
    asked = Reevaluation.objects.unheld().filter(cancel_requested_at__isnull=False)
    return asked.update(state=ReevaluationState.CANCELLED, ended_at=Now(), lease_token=None)


def publish_open_reevaluations() -> int:
    """Publish the jobs that no worker holds; return how many. Ends the cancelled ones."""
    end_cancelled()
    waiting = list(Reevaluation.objects.unheld().values_list("pk", flat=True))
    with transaction.atomic():
        for pk in waiting:
            publish_reevaluation(reevaluation_id=pk)
    return len(waiting)


def take_reevaluation(*, reevaluation_id: UUID, item_seconds: float) -> Holding | None:
    """Take a job, one worker at a time; None when it is not to be had."""
    token = uuid4()
    free = Reevaluation.objects.unheld().filter(
        pk=reevaluation_id, cancel_requested_at__isnull=True
    )
    won = free.update(
        state=ReevaluationState.RUNNING,
        lease_token=token,
        lease_expires_at=Now() + timedelta(seconds=item_seconds + LEASE_SECONDS),
    )
    if not won:
        return None
    jobs = Reevaluation.objects.select_related("experiment")
    return Holding(jobs.get(pk=reevaluation_id), token)


def keep_reevaluation(*, holding: Holding, item_seconds: float) -> bool:
    """Hold a job for one more rollout; False when it is lost or to be cancelled."""
    held = _held(holding).filter(cancel_requested_at__isnull=True)
    until = Now() + timedelta(seconds=item_seconds + LEASE_SECONDS)
    return bool(held.update(lease_expires_at=until))


def give_reevaluation_back(*, holding: Holding) -> None:
    """Let go of a job: over when nothing is left of it, else another worker goes on."""
    with transaction.atomic():
        if not _held(holding).update(lease_token=None, lease_expires_at=None):
            return
        if not next_rollouts(job=holding.job, count=1):
            Reevaluation.objects.unheld().filter(
                pk=holding.job.pk, cancel_requested_at__isnull=True
            ).update(state=ReevaluationState.DONE, ended_at=Now())
        end_cancelled()
        if not has_urgent_work():
            still = Reevaluation.objects.unheld().filter(pk=holding.job.pk)
            if still.exists():
                publish_reevaluation(reevaluation_id=holding.job.pk)


def next_rollouts(*, job: Reevaluation, count: int) -> list[UUID]:
    """Return rollouts that a job did not reach yet."""
    reached = Evaluation.objects.filter(reevaluation=job, rollout=OuterRef("pk"))
    left = _scored(experiment=job.experiment).filter(~Exists(reached))
    return list(left.order_by("pk").values_list("pk", flat=True)[:count])


def has_urgent_work() -> bool:
    """Tell whether rollouts wait for EVAL, which go before every re-evaluation."""
    return Attempt.objects.queued().filter(stage=Stage.EVAL).exists()


def write_rescored(*, job: Reevaluation, rollout_id: UUID, found: Rescored) -> bool:
    """Write what scoring one rollout again found; False when another worker did before."""
    row = Evaluation(
        rollout_id=rollout_id,
        reevaluation=job,
        source=EvaluationSource.REEVALUATION,
        evaluator=found.evaluator,
        evaluator_version=found.evaluator_version[:32],
        settings_digest=found.settings_digest,
        reward=found.reward,
        rewards=clean_json(dict(found.rewards or {})),
        turn_rewards=list(found.turn_rewards),
        details=clean_json(dict(found.details or {})),
        log=clean_text(found.log),
        code=found.code[:64],
    )
    before = Evaluation.objects.filter(reevaluation=job, rollout_id=rollout_id)
    Evaluation.objects.bulk_create([row], ignore_conflicts=True)
    return before.filter(pk=row.pk).exists()


def _held(holding: Holding) -> QuerySet[Reevaluation]:
    return Reevaluation.objects.open().filter(pk=holding.job.pk, lease_token=holding.token)


def _scored(*, experiment: Experiment) -> QuerySet[Rollout]:
    """Return the rollouts that a re-evaluation can score: those with a reward."""
    return Rollout.objects.scored().filter(experiment=experiment)
