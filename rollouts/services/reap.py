"""The reaper: what dead workers, lost messages and expired leases leave is put right here."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from rollouts.models import Attempt, Experiment, Rollout, Worker
from rollouts.services.attempts import NO_WORKERS, lock_rollout
from rollouts.services.batches import expire_batches
from rollouts.services.cancel import end_if_unclaimed
from rollouts.services.deadlines import close_overdue_groups
from rollouts.services.early_end import cancel_leftovers, end_all_early
from rollouts.services.idempotency import forget_old_calls
from rollouts.services.messages import publish_attempt, publish_sweep
from rollouts.services.policy_updates import held_seconds
from rollouts.services.retry import after_fault
from rollouts.states import AttemptState, RolloutState, Stage
from sandboxes.models import Sandbox
from sandboxes.states import SandboxState

logger = logging.getLogger(__name__)

ORPHAN_SECONDS = 10.0
LONGEST_WAIT_SECONDS = 60.0


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
    overdue_groups: int
    ended_early: int
    left_running: int
    forgotten_calls: int


def reap() -> Reaped:
    """Do one round; any number of reapers may run at once, each row is handled by one.

    A step that fails is logged and does not keep the others from their work.
    """
    now = timezone.now()
    return Reaped(
        workers=_step(_bury_workers),
        attempts=_step(_recover_attempts),
        overdue=_step(partial(_give_up_overdue, now)),
        republished=_step(partial(_republish, now)),
        cancelled=_step(_finish_cancels),
        leftovers=_step(_sweep_leftovers),
        batches=_step(expire_batches),
        overdue_groups=_step(close_overdue_groups),
        ended_early=_step(end_all_early),
        left_running=_step(cancel_leftovers),
        forgotten_calls=_step(partial(forget_old_calls, now=now)),
    )


def _step(work: Callable[[], int]) -> int:
    try:
        return work()
    except Exception:
        logger.exception("a step of the reaper failed; the next round tries again")
        return 0


def _bury_workers() -> int:
    """End the registration of processes whose lease ran out, by the database's clock."""
    return Worker.objects.lapsed().update(ended_at=Now())


def _recover_attempts() -> int:
    dead = Attempt.objects.running().filter(worker__ended_at__isnull=False)
    workers = set(dead.values_list("worker__id", flat=True))
    return sum(recover_attempts_of(worker_id=worker_id) for worker_id in workers)


def recover_attempts_of(*, worker_id: UUID) -> int:
    """Close the running attempts of an ended process as lost and write what follows."""
    recovered = 0
    for attempt in list(Attempt.objects.running().filter(worker_id=worker_id)):
        recovered += _lose_safely(
            attempt,
            code=f"{attempt.stage}.worker_lost",
            detail="The worker process stopped renewing its lease.",
        )
    return recovered


def recover_orphans(*, worker_id: UUID, held: Collection[UUID]) -> int:
    """Close attempts that a live process claimed and does not hold: their end was not written.

    Those claimed a moment ago are left alone: the claim may not have reached its stage yet.
    """
    recovered = 0
    orphans = (
        Attempt.objects.running()
        .filter(worker_id=worker_id, started_at__lt=Now() - timedelta(seconds=ORPHAN_SECONDS))
        .exclude(pk__in=held)
    )
    for attempt in list(orphans):
        recovered += _lose_safely(
            attempt,
            code=f"{attempt.stage}.end_unwritten",
            detail="The worker ended its work and could not write what came of it.",
        )
    return recovered


def _lose_safely(attempt: Attempt, **why: Any) -> int:
    try:
        return _lose(attempt, **why)
    except Exception:
        logger.exception("attempt %s could not be recovered; the next round tries", attempt.pk)
        return 0


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
        ends_at = attempt.started_at + timedelta(seconds=budget + grace)
        if ends_at < now and ends_at + timedelta(seconds=_held_seconds(attempt, now)) < now:
            count += _lose_safely(
                attempt,
                code=f"{attempt.stage}.overdue",
                detail=f"Not finished {grace:g} s after its budget of {budget:g} s.",
                timed_out=attempt.stage != Stage.RUN,
                restart_from_init=True,
            )
    return count


def _held_seconds(attempt: Attempt, now: datetime) -> float:
    """Return for how long updates of the policy kept a RUN attempt from generating."""
    if attempt.stage != Stage.RUN or attempt.started_at is None:
        return 0.0
    policy_id = Experiment.objects.values_list("policy_id", flat=True).get(
        rollouts=attempt.rollout_id
    )
    return held_seconds(policy_id=policy_id, since=attempt.started_at, until=now)


def _republish(now: datetime) -> int:
    """Publish again what no worker started: the wait doubles with each message."""
    count = 0
    first = now - timedelta(seconds=settings.REPUBLISH_SECONDS)
    waiting = Attempt.objects.queued().filter(published_at__lte=first).select_related("node")
    for attempt in waiting:
        assert attempt.published_at is not None
        wait = settings.REPUBLISH_SECONDS * 2 ** min(max(attempt.publish_count - 1, 0), 10)
        wait = min(wait, max(settings.REPUBLISH_SECONDS, LONGEST_WAIT_SECONDS))
        if attempt.published_at + timedelta(seconds=wait) > now:
            continue
        if attempt.node is not None and _node_is_dead(attempt):
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


def _node_is_dead(attempt: Attempt) -> bool:
    live = Worker.objects.live().filter(node=attempt.node, stage=attempt.stage)
    return not live.exists()


def _abandon(attempt: Attempt) -> int:
    """Give up an attempt that waits for a node without workers: its rollout starts elsewhere."""
    with transaction.atomic():
        lock_rollout(rollout_id=attempt.rollout_id)
        won = Attempt.objects.filter(pk=attempt.pk, state=AttemptState.QUEUED).update(
            state=AttemptState.LOST,
            ended_at=timezone.now(),
            failure_code=NO_WORKERS,
            failure_detail=f"No live {attempt.stage} worker on the node.",
        )
        if won:
            after_fault(
                rollout_id=attempt.rollout_id,
                stage=attempt.stage,
                code=NO_WORKERS,
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
    done = Rollout.objects.filter(state=RolloutState.DONE)
    with transaction.atomic():
        # One statement: a rollout that is retried meanwhile keeps its new sandbox.
        count = (
            Sandbox.objects.usable()
            .filter(owner__in=done.values("pk"))
            .update(state=SandboxState.STOPPING)
        )
        stopping = Sandbox.objects.filter(state=SandboxState.STOPPING)
        nodes = set(stopping.values_list("node__name", flat=True)) & _nodes_with_init()
        for node in nodes:
            publish_sweep(node=node)
    return count


def _nodes_with_init() -> set[str]:
    live = Worker.objects.live().filter(stage=Stage.INIT)
    return set(live.values_list("node__name", flat=True))


def request_sweeps() -> int:
    """Ask every node with a live INIT worker to compare its instances with the rows."""
    nodes = _nodes_with_init()
    with transaction.atomic():
        for node in nodes:
            publish_sweep(node=node)
    return len(nodes)
