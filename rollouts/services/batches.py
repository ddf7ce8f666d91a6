"""Batches: lease finished groups, acknowledge, give back, extend, expire.

Leases run by the database's clock: web processes and reapers on other machines compare them.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Min
from django.db.models.functions import Now

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.filters.registry import TOO_STALE
from rollouts.models import Batch, Experiment, Group
from rollouts.selection_options import CANCEL, Selection
from rollouts.services.batch_choice import Wish, given_back, most_at_once, next_groups, too_stale
from rollouts.services.early_end import cancel_open
from rollouts.services.events import emit
from rollouts.services.feed_returns import return_tasks
from rollouts.services.messages import publish_feed
from rollouts.services.pacing import meet_demand, note_demand
from rollouts.services.selection import stale_detail
from rollouts.states import BatchState, Feed, GroupState

MAX_GROUPS = 4096
_TRIES = 5


def lease_batch(
    *,
    experiment: Experiment,
    owner: Any,
    groups: int,
    max_policy_lag: int | None = None,
    min_complete_fraction: float | None = None,
) -> Batch | None:
    """Lease the next finished groups, or return None while there are fewer.

    A batch of this size that came back goes first, as it was. Groups older than the smaller of the
    two lags are filtered and their tasks return. Locks the experiment's row, then the groups: two
    callers at the same time never get the same group. Raises InvalidValue for more groups than a
    pulling experiment ever has.
    """
    wish = Wish(
        groups=groups, max_policy_lag=max_policy_lag, min_complete_fraction=min_complete_fraction
    )
    with transaction.atomic():
        locked = (
            Experiment.objects.select_for_update(no_key=True, of=("self",))
            .select_related("policy")
            .get(pk=experiment.pk)
        )
        version = locked.policy.version
        limit = wish.lag_limit(locked)
        if limit is not None:
            _drop_stale(locked, version, limit)
        batch = _take(locked, owner, wish, version)
        if batch is None:
            note_demand(experiment_id=locked.pk, version=version)
        else:
            meet_demand(experiment_id=locked.pk)
            if Selection.stored(locked.selection).unfinished == CANCEL:
                cancel_open(experiment=locked)
    most = most_at_once(locked) if batch is None else None
    if most is not None and groups > most:
        raise InvalidValue(
            f"The experiment's feed keeps at most {most} groups on their way; ask for no more, or "
            "raise feed_settings.batch_groups and feed.groups_in_flight.",
            code="batch.too_large",
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
    won = Batch.objects.held().filter(pk=batch_id)
    if not won.update(lease_expires_at=Now() + timedelta(seconds=seconds)):
        _refuse(batch_id)
    return Batch.objects.get(pk=batch_id)


def expire_batches() -> int:
    """Give back every batch whose lease ran out; return how many."""
    count = 0
    for batch_id in list(Batch.objects.expired().values_list("pk", flat=True)):
        with transaction.atomic():
            expired = Batch.objects.expired().filter(pk=batch_id)
            if expired.update(state=BatchState.EXPIRED, closed_at=Now()):
                _release_groups(batch_id)
                _tell(batch_id, "batch.expired")
                count += 1
    return count


def _take(experiment: Experiment, owner: Any, wish: Wish, version: int) -> Batch | None:
    """Lease what is chosen; what an operator's retry took meanwhile is chosen anew."""
    for _try in range(_TRIES):
        repeated = given_back(experiment=experiment, wish=wish)
        if repeated is not None:
            chosen: list[UUID] | None = repeated[1]
        else:
            chosen = next_groups(experiment=experiment, wish=wish)
        if chosen is None:
            return None
        ready = Group.objects.filter(pk__in=chosen, state=GroupState.READY)
        locked = ready.select_for_update(no_key=True).order_by("pk").values_list("pk", flat=True)
        if len(locked) == len(chosen):
            return _lease(experiment, owner, chosen, version, repeated and repeated[0])
    return None


def _lease(
    experiment: Experiment, owner: Any, groups: list[UUID], version: int, repeats: Batch | None
) -> Batch:
    of_experiment = Batch.objects.filter(experiment=experiment)
    chosen = Group.objects.filter(pk__in=groups)
    oldest = chosen.aggregate(oldest=Min("oldest_version"))["oldest"]
    batch = Batch(
        experiment=experiment,
        owner=owner,
        number=(of_experiment.aggregate(last=Max("number"))["last"] or 0) + 1,
        repeats=repeats,
        group_count=len(groups),
        policy_version=version,
        max_lag=None if oldest is None else max(0, version - oldest),
        lease_expires_at=Now() + timedelta(seconds=settings.BATCH_LEASE_SECONDS),
    )
    batch.save(force_insert=True)
    batch.refresh_from_db(fields=["lease_expires_at"])
    chosen.update(state=GroupState.LEASED, batch=batch, last_batch=None)
    emit(
        experiment.pk,
        "batch.leased",
        batch=batch.pk,
        number=batch.number,
        groups=batch.group_count,
        version=version,
        max_lag=batch.max_lag,
        repeats=batch.repeats_id,
    )
    return batch


def _drop_stale(experiment: Experiment, version: int, limit: int) -> None:
    """Filter the ready groups that are too stale, count them, and let their tasks return."""
    stale = too_stale(experiment=experiment, version=version, limit=limit)
    locked = list(stale.select_for_update(no_key=True).order_by("pk"))
    by_age: dict[int, list[UUID]] = {}
    for group in locked:
        by_age.setdefault(version - (group.oldest_version or 0), []).append(group.pk)
    for lag, ids in by_age.items():
        detail = stale_detail(lag=lag, limit=limit)
        Group.objects.filter(pk__in=ids).update(
            state=GroupState.FILTERED, filter_rule=TOO_STALE, filter_detail=detail, last_batch=None
        )
    return_tasks(groups=[group.pk for group in locked], reason=TOO_STALE)
    if locked and experiment.feed == Feed.PULL:
        publish_feed(experiment_id=experiment.pk)
    for group in locked:
        emit(experiment.pk, "group.filtered", group=group.pk, task=group.task_id, rule=TOO_STALE)


def _close(batch_id: UUID, state: str) -> None:
    with transaction.atomic():
        if not Batch.objects.held().filter(pk=batch_id).update(state=state, closed_at=Now()):
            if Batch.objects.filter(pk=batch_id, state=state).exists():
                return
            _refuse(batch_id)
        if state == BatchState.ACKNOWLEDGED:
            Group.objects.filter(batch_id=batch_id, state=GroupState.LEASED).update(
                state=GroupState.CONSUMED
            )
        else:
            _release_groups(batch_id)
        _tell(batch_id, f"batch.{state}")


def _release_groups(batch_id: UUID) -> None:
    """Make a batch's groups ready again, each with the batch that it came from."""
    Group.objects.filter(batch_id=batch_id, state=GroupState.LEASED).update(
        state=GroupState.READY, batch=None, last_batch_id=batch_id
    )


def _tell(batch_id: UUID, kind: str) -> None:
    batch = Batch.objects.select_related("experiment").get(pk=batch_id)
    emit(batch.experiment_id, kind, batch=batch.pk, number=batch.number)
    if batch.experiment.feed == Feed.PULL:
        publish_feed(experiment_id=batch.experiment_id)


def _refuse(batch_id: UUID) -> None:
    batch = Batch.objects.filter(pk=batch_id).first()
    if batch is None:
        raise NotThere("There is no such batch.")
    if batch.state in (BatchState.LEASED, BatchState.EXPIRED):
        raise StateConflict("The lease has expired; lease a batch again.", code="batch.expired")
    raise StateConflict(
        f"The batch is {batch.state}; only a leased batch can be changed.",
        code=f"batch.{batch.state}",
    )
