"""Cancelling: flag, commit, then the workers see it within a second."""

import logging
from uuid import UUID

from django.db import OperationalError, models, transaction
from django.db.models.functions import Coalesce
from django.utils import timezone

from rollouts.exceptions import NotThere, StateConflict
from rollouts.models import Attempt, Experiment, Group, JournalEntry, Rollout
from rollouts.services.end import end_rollout
from rollouts.services.events import emit, emit_each, emit_rollouts_done
from rollouts.services.messages import publish_feed
from rollouts.services.selection import lock_group, settle_group
from rollouts.states import (
    AttemptState,
    ExperimentState,
    Feed,
    GroupState,
    Outcome,
    RolloutState,
)
from sandboxes.services.snapshots import fail_requested

logger = logging.getLogger(__name__)


def cancel_rollout(*, rollout_id: UUID) -> bool:
    """Cancel one rollout; True when it ended at once, False when a worker will end it soon.

    Raises NotThere, or StateConflict when it is done. Asking twice is the same as asking once.
    """
    with transaction.atomic():
        rollout = Rollout.objects.select_for_update().filter(pk=rollout_id).first()
        if rollout is None:
            raise NotThere("There is no such rollout.")
        if rollout.state == RolloutState.DONE:
            raise StateConflict(
                f"The rollout is done already ({rollout.outcome}).", code="rollout.done"
            )
        if rollout.cancel_requested_at is None:
            rollout.cancel_requested_at = timezone.now()
            rollout.save(update_fields=["cancel_requested_at"])
        return end_if_unclaimed(rollout_id=rollout_id)


def end_if_unclaimed(*, rollout_id: UUID) -> bool:
    """End a rollout whose cancel was asked for and which no worker holds; inside a transaction."""
    held = Attempt.objects.select_for_update().filter(
        rollout_id=rollout_id, state=AttemptState.RUNNING
    )
    if held.exists():
        return False
    return end_rollout(rollout_id=rollout_id, outcome=Outcome.CANCELLED)


def cancel_group(*, group_id: UUID) -> int:
    """Cancel what is unfinished in a group; return how many. Raises NotThere, StateConflict."""
    with transaction.atomic():
        if not Group.objects.filter(pk=group_id).exists():
            raise NotThere("There is no such group.")
        group = lock_group(group_id=group_id)
        if group.state != GroupState.OPEN:
            raise StateConflict(f"The group is {group.state}, not open.", code="group.not_open")
        Group.objects.filter(pk=group_id).update(state=GroupState.CANCELLED)
        emit(group.experiment_id, "group.cancelled", group=group.pk, task=group.task_id)
        if group.experiment.feed == Feed.PULL:
            publish_feed(experiment_id=group.experiment_id)
    return cancel_rest(group_id=group_id)


def cancel_rest(*, group_id: UUID) -> int:
    """Cancel what is unfinished of a group's rollouts, whatever the group is; return how many."""
    count = _end_queued(group_id=group_id)
    in_stage = Rollout.objects.unfinished().filter(group_id=group_id)
    return count + cancel_many(ids=list(in_stage.values_list("pk", flat=True)))


def cancel_many(*, ids: list[UUID]) -> int:
    """Cancel each of several rollouts in its own transaction; those already done are skipped."""
    count = 0
    for rollout_id in ids:
        try:
            cancel_rollout(rollout_id=rollout_id)
        except StateConflict:
            continue
        except OperationalError:
            logger.exception("rollout %s could not be cancelled now", rollout_id)
            continue
        count += 1
    return count


def stop_experiment(*, experiment_id: UUID) -> int:
    """Stop an experiment and cancel all that is unfinished; return how many were cancelled.

    What waits in the queue ends in a few statements, however much it is; what is in a stage is
    bounded by the slots and cancelled one by one.
    """
    with transaction.atomic():
        Experiment.objects.filter(pk=experiment_id).update(state=ExperimentState.STOPPED)
        groups = Group.objects.filter(experiment_id=experiment_id, state=GroupState.OPEN)
        still_open = groups.select_for_update(no_key=True).order_by("pk")
        ids = list(still_open.values_list("pk", flat=True))
        Group.objects.filter(pk__in=ids).update(state=GroupState.CANCELLED)
        emit(experiment_id, "experiment.state", state=str(ExperimentState.STOPPED))
        emit_each(experiment_id, "group.cancelled", [{"group": group_id} for group_id in ids])
    count = _end_queued(experiment_id=experiment_id)
    in_stage = Rollout.objects.unfinished().filter(experiment_id=experiment_id)
    return count + cancel_many(ids=list(in_stage.values_list("pk", flat=True)))


def _end_queued(**of: UUID) -> int:
    """End every queued rollout of a group or experiment, and count them in their groups."""
    now = timezone.now()
    with transaction.atomic():
        queued = Rollout.objects.filter(**of, state=RolloutState.QUEUED)
        locked = queued.select_for_update().order_by("pk")
        ids = list(locked.values_list("pk", flat=True))
        per_group = dict(
            Rollout.objects.filter(pk__in=ids)
            .order_by()
            .values_list("group_id")
            .annotate(count=models.Count("pk"))
        )
        Rollout.objects.filter(pk__in=ids).update(
            state=RolloutState.DONE,
            outcome=Outcome.CANCELLED,
            done_at=now,
            cancel_requested_at=Coalesce(models.F("cancel_requested_at"), now),
        )
        emit_rollouts_done(ids)
        JournalEntry.objects.filter(rollout_id__in=ids).delete()
        fail_requested(owners=ids, detail="The rollout ended before that turn was done.")
        # In one order everywhere: two that count in the same groups never wait for each other.
        touched = Group.objects.select_for_update(no_key=True).filter(pk__in=per_group)
        list(touched.order_by("pk").values_list("pk", flat=True))
        for count in sorted(set(per_group.values())):
            groups = [pk for pk, found in per_group.items() if found == count]
            Group.objects.filter(pk__in=groups).update(done_count=models.F("done_count") + count)
        full = Group.objects.filter(
            pk__in=per_group, state=GroupState.OPEN, done_count=models.F("size")
        )
        for group_id in list(full.order_by("pk").values_list("pk", flat=True)):
            settle_group(group=lock_group(group_id=group_id))
    return len(ids)
