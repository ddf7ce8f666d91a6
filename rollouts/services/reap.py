"""The reaper: what dead workers, lost messages and expired leases leave is put right here."""

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from rollouts.models import Attempt, Rollout, Worker
from rollouts.services.attempts import lock_rollout
from rollouts.services.batches import expire_batches
from rollouts.services.cancel import end_if_unclaimed
from rollouts.services.idempotency import forget_old_calls
from rollouts.services.messages import publish_attempt, publish_sweep
from rollouts.services.retry import after_fault
from rollouts.states import AttemptState, RolloutState, Stage
from sandboxes.models import Sandbox
from sandboxes.services.lifecycle import give_up_sandboxes
from sandboxes.states import SandboxState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reaped:
    """What one round did."""

    workers: int
    attempts: int
    overdue: int
    republished: int
    cancelled: int
    leftovers: int
    batches: int
    forgotten_calls: int


def reap() -> Reaped:
    """Do one round; any number of reapers may run at once, each row is handled by one."""
    now = timezone.now()
    return Reaped(
        *_bury_workers(now),
        overdue=_give_up_overdue(now),
        republished=_republish(now),
        cancelled=_finish_cancels(),
        leftovers=_sweep_leftovers(),
        batches=expire_batches(now=now),
        forgotten_calls=forget_old_calls(now=now),
    )


def _bury_workers(now: datetime) -> tuple[int, int]:
    buried = attempts = 0
    for worker_id in list(Worker.objects.lapsed(now).values_list("pk", flat=True)):
        buried += Worker.objects.filter(
            pk=worker_id, ended_at__isnull=True, lease_expires_at__lte=now
        ).update(ended_at=now)
    dead = Attempt.objects.running().filter(worker__ended_at__isnull=False)
    for worker_id in set(dead.values_list("worker__id", flat=True)):
        attempts += recover_attempts_of(worker_id=worker_id)
    return buried, attempts


def recover_attempts_of(*, worker_id: UUID) -> int:
    """Close the running attempts of an ended process as lost and write what follows."""
    recovered = 0
    for attempt in list(Attempt.objects.running().filter(worker_id=worker_id)):
        recovered += _lose(
            attempt,
            code=f"{attempt.stage}.worker_lost",
            detail="The worker process stopped renewing its lease.",
        )
    return recovered


def _lose(
    attempt: Attempt,
    *,
    code: str,
    detail: str,
    timed_out: bool = False,
    restart_from_init: bool = False,
) -> int:
    with transaction.atomic():
        lock_rollout(rollout_id=attempt.rollout_id)
        won = Attempt.objects.filter(
            pk=attempt.pk, state=AttemptState.RUNNING, lease_token=attempt.lease_token
        ).update(
            state=AttemptState.LOST,
            ended_at=timezone.now(),
            failure_code=code,
            failure_detail=detail,
        )
        if not won:
            return 0
        after_fault(
            rollout_id=attempt.rollout_id,
            stage=attempt.stage,
            code=code,
            detail=detail,
            timed_out=timed_out,
            restart_from_init=restart_from_init,
        )
    logger.warning("attempt %s of rollout %s lost: %s", attempt.pk, attempt.rollout_id, code)
    return 1


def _give_up_overdue(now: datetime) -> int:
    """Take away attempts that run past their budget and the grace although their worker lives."""
    count = 0
    grace = settings.STAGE_GRACE_SECONDS
    for attempt in Attempt.objects.running().filter(started_at__isnull=False):
        assert attempt.started_at is not None
        budget = min(attempt.budget_seconds, settings.STAGE_LIMIT_SECONDS)
        if attempt.started_at + timedelta(seconds=budget + grace) < now:
            count += _lose(
                attempt,
                code=f"{attempt.stage}.overdue",
                detail=f"Not finished {grace:g} s after its budget of {budget:g} s.",
                timed_out=attempt.stage != Stage.RUN,
                restart_from_init=True,
            )
    return count


def _republish(now: datetime) -> int:
    """Publish again what no worker started: the wait doubles with each message."""
    count = 0
    first = now - timedelta(seconds=settings.REPUBLISH_SECONDS)
    waiting = Attempt.objects.queued().filter(published_at__lte=first).select_related("node")
    for attempt in waiting:
        assert attempt.published_at is not None
        wait = settings.REPUBLISH_SECONDS * 2 ** min(max(attempt.publish_count - 1, 0), 5)
        if attempt.published_at + timedelta(seconds=wait) > now:
            continue
        if attempt.node is not None and _node_is_dead(attempt, now):
            count += _abandon(attempt)
            continue
        with transaction.atomic():
            won = Attempt.objects.filter(
                pk=attempt.pk, state=AttemptState.QUEUED, publish_count=attempt.publish_count
            ).update(published_at=now, publish_count=F("publish_count") + 1)
            if won:
                node = attempt.node.name if attempt.node else None
                publish_attempt(attempt_id=attempt.pk, stage=attempt.stage, node=node)
                count += 1
    return count


def _node_is_dead(attempt: Attempt, now: datetime) -> bool:
    live = Worker.objects.live(now).filter(node=attempt.node, stage=attempt.stage)
    return not live.exists()


def _abandon(attempt: Attempt) -> int:
    """Give up an attempt that waits for a node without workers: its rollout starts elsewhere."""
    with transaction.atomic():
        lock_rollout(rollout_id=attempt.rollout_id)
        won = Attempt.objects.filter(pk=attempt.pk, state=AttemptState.QUEUED).update(
            state=AttemptState.LOST,
            ended_at=timezone.now(),
            failure_code="node.no_workers",
            failure_detail=f"No live {attempt.stage} worker on the node.",
        )
        if won:
            after_fault(
                rollout_id=attempt.rollout_id,
                stage=attempt.stage,
                code="node.no_workers",
                detail=f"No live {attempt.stage} worker on the node.",
                restart_from_init=True,
            )
    return won


def _finish_cancels() -> int:
    """End cancelled rollouts that no worker holds."""
    count = 0
    asked = Rollout.objects.unfinished().filter(cancel_requested_at__isnull=False)
    for rollout_id in list(asked.values_list("pk", flat=True)):
        with transaction.atomic():
            locked = Rollout.objects.select_for_update(skip_locked=True).filter(pk=rollout_id)
            if locked.exists():
                count += end_if_unclaimed(rollout_id=rollout_id)
    return count


def _sweep_leftovers() -> int:
    """Ask the nodes to remove sandboxes whose rollout is done or which are marked for removal."""
    present = Sandbox.objects.present()
    done = Rollout.objects.filter(state=RolloutState.DONE, pk__in=present.values("owner"))
    owners = list(done.values_list("pk", flat=True))
    with transaction.atomic():
        for owner in owners:
            give_up_sandboxes(owner=owner)
        nodes = set(
            Sandbox.objects.filter(state=SandboxState.STOPPING).values_list("node__name", flat=True)
        )
        for node in nodes:
            publish_sweep(node=node)
    return len(owners)


def request_sweeps() -> int:
    """Ask every node with a live INIT worker to compare its instances with the rows."""
    now = timezone.now()
    nodes = set(
        Worker.objects.live(now).filter(stage=Stage.INIT).values_list("node__name", flat=True)
    )
    with transaction.atomic():
        for node in nodes:
            publish_sweep(node=node)
    return len(nodes)
