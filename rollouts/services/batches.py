"""Batches: lease finished groups, acknowledge, give back, extend, expire."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from rollouts.exceptions import NotThere, StateConflict
from rollouts.models import Batch, Experiment, Group
from rollouts.states import BatchState, GroupState

MAX_GROUPS = 4096


def lease_batch(*, experiment: Experiment, owner: Any, groups: int) -> Batch | None:
    """Lease the next finished groups in start order, or None when there are fewer.

    Locks the groups; two callers at the same time never get the same group.
    """
    now = timezone.now()
    with transaction.atomic():
        locked = (
            Group.objects.select_for_update(skip_locked=True)
            .filter(experiment=experiment)
            .leasable()
        )
        ids = list(locked.values_list("pk", flat=True)[:groups])
        if len(ids) < groups:
            return None
        batch = Batch.objects.create(
            experiment=experiment,
            owner=owner,
            group_count=groups,
            policy_version=experiment.policy.version,
            lease_expires_at=now + timedelta(seconds=settings.BATCH_LEASE_SECONDS),
        )
        Group.objects.filter(pk__in=ids, state=GroupState.READY).update(
            state=GroupState.LEASED, batch=batch
        )
        return batch


def acknowledge_batch(*, batch_id: UUID) -> None:
    """Say that a batch was consumed; saying it again is the same as saying it once.

    Raises NotThere, or StateConflict when the lease ended before.
    """
    _close(batch_id, BatchState.ACKNOWLEDGED)


def return_batch(*, batch_id: UUID) -> None:
    """Give a batch back: its groups can be leased again. Raises NotThere, StateConflict."""
    _close(batch_id, BatchState.RETURNED)


def extend_batch(*, batch_id: UUID, seconds: float) -> Batch:
    """Lengthen the lease to `seconds` from now. Raises NotThere, StateConflict."""
    now = timezone.now()
    won = Batch.objects.filter(
        pk=batch_id, state=BatchState.LEASED, lease_expires_at__gt=now
    ).update(lease_expires_at=now + timedelta(seconds=seconds))
    if not won:
        _refuse(batch_id)
    return Batch.objects.get(pk=batch_id)


def expire_batches(*, now: datetime) -> int:
    """Give back every batch whose lease ran out; return how many."""
    count = 0
    for batch_id in list(Batch.objects.expired(now).values_list("pk", flat=True)):
        with transaction.atomic():
            won = Batch.objects.filter(
                pk=batch_id, state=BatchState.LEASED, lease_expires_at__lte=now
            ).update(state=BatchState.EXPIRED, closed_at=now)
            if won:
                _release_groups(batch_id)
                count += 1
    return count


def _close(batch_id: UUID, state: str) -> None:
    now = timezone.now()
    with transaction.atomic():
        won = Batch.objects.filter(
            pk=batch_id, state=BatchState.LEASED, lease_expires_at__gt=now
        ).update(state=state, closed_at=now)
        if not won:
            if Batch.objects.filter(pk=batch_id, state=state).exists():
                return
            _refuse(batch_id)
        if state == BatchState.ACKNOWLEDGED:
            Group.objects.filter(batch_id=batch_id, state=GroupState.LEASED).update(
                state=GroupState.CONSUMED
            )
        else:
            _release_groups(batch_id)


def _release_groups(batch_id: UUID) -> None:
    Group.objects.filter(batch_id=batch_id, state=GroupState.LEASED).update(
        state=GroupState.READY, batch=None
    )


def _refuse(batch_id: UUID) -> None:
    batch = Batch.objects.filter(pk=batch_id).first()
    if batch is None:
        raise NotThere("There is no such batch.")
    if batch.state == BatchState.LEASED:
        raise StateConflict("The lease has expired; lease a batch again.", code="batch.expired")
    raise StateConflict(
        f"The batch is {batch.state}; only a leased batch can be changed.",
        code=f"batch.{batch.state}",
    )
