"""Opening and closing attempts; the building blocks of every transition."""

from uuid import UUID

from django.db.models.functions import Now
from django.utils import timezone

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, Rollout
from rollouts.options import Budgets
from rollouts.services.messages import publish_attempt
from rollouts.states import AttemptState
from rollouts.text import clean_text
from sandboxes.models import Node

GIVEN_BACK = "worker.shutdown"
NO_WORKERS = "node.no_workers"
COMMAND_INTERRUPTED = "agent.command_interrupted"
# Not a rollout's bad luck, or only what follows a lost try that was counted: these are no tries.
UNCOUNTED = (GIVEN_BACK, NO_WORKERS, COMMAND_INTERRUPTED)


def open_attempt(*, rollout: Rollout, stage: str, node: Node | None) -> Attempt:
    """Insert the next attempt at a stage and publish it on commit; call inside a transaction."""
    now = timezone.now()
    number = Attempt.objects.filter(rollout=rollout, stage=stage).count() + 1
    attempt = Attempt.objects.create(
        rollout=rollout,
        stage=stage,
        number=number,
        node=node,
        budget_seconds=Budgets.stored(rollout.experiment.budgets).of_stage(stage),
        published_at=now,
        publish_count=1,
    )
    publish_attempt(attempt_id=attempt.id, stage=stage, node=node.name if node else None)
    return attempt


def lock_rollout(*, rollout_id: UUID) -> None:
    """Lock a rollout's row; every transition does so before it touches attempts (lock order)."""
    Rollout.objects.select_for_update().only("pk").get(pk=rollout_id)


def close_attempt(
    *, attempt_id: UUID, token: UUID, state: str, code: str = "", detail: str = ""
) -> None:
    """End a running attempt under its lease token. Raises LeaseLost when it is held no longer."""
    won = Attempt.objects.filter(
        pk=attempt_id, lease_token=token, state=AttemptState.RUNNING
    ).update(
        state=state,
        ended_at=Now(),
        failure_code=code,
        failure_detail=clean_text(detail)[:4000],
    )
    if not won:
        raise LeaseLost(f"attempt {attempt_id} belongs to another worker or has ended")


def attempts_used(*, rollout: Rollout, stage: str) -> int:
    """Return how many tries at a stage failed or were lost since an operator's last retry.

    Those that a worker gave back because it ended are left out, and so are those never started.
    """
    started = Attempt.objects.filter(
        rollout=rollout,
        stage=stage,
        started_at__isnull=False,
        state__in=[AttemptState.FAILED, AttemptState.LOST],
    )
    if rollout.retried_at is not None:
        started = started.filter(created_at__gte=rollout.retried_at)
    return started.exclude(failure_code__in=UNCOUNTED).count()
