"""Ending a rollout, exactly once."""

from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from rollouts.models import Attempt, JournalEntry, Rollout
from rollouts.services.events import EventKind, emit
from rollouts.services.messages import publish_dispatch, publish_sweep
from rollouts.services.selection import count_sample
from rollouts.services.timings import stage_timings
from rollouts.states import ACTIVE_ATTEMPT, AttemptState, Event, RolloutState, sources
from sandboxes.services.lifecycle import give_up_sandboxes
from sandboxes.services.snapshots import fail_requested


@transaction.atomic(savepoint=False)
def end_rollout(*, rollout_id: UUID, outcome: str, sweep: bool = True, **values: Any) -> bool:
    """Move a rollout to done, count it in its group and give up its sandboxes.

    Part of the caller's transaction. Returns False when it was done already: then nothing is
    written. `values` are further columns (reward, stop_reason, failure_code …). A worker that
    removes the sandboxes itself asks for no sweep.
    """
    now = timezone.now()
    won = Rollout.objects.filter(pk=rollout_id, state__in=sources(Event.END)).update(
        state=RolloutState.DONE, outcome=outcome, done_at=now, **values
    )
    if not won:
        return False
    Attempt.objects.filter(rollout_id=rollout_id, state__in=ACTIVE_ATTEMPT).update(
        state=AttemptState.CANCELLED, ended_at=now
    )
    rollout = Rollout.objects.defer("answer", "last_message").get(pk=rollout_id)
    timings = {**rollout.timings, **stage_timings(rollout_id=rollout_id)}
    Rollout.objects.filter(pk=rollout_id).update(timings=timings)
    JournalEntry.objects.filter(rollout_id=rollout_id).delete()
    fail_requested(owners=[rollout_id], detail="The rollout ended before that turn was done.")
    emit(
        rollout.experiment_id,
        EventKind.ROLLOUT_DONE,
        rollout=rollout_id,
        group=rollout.group_id,
        sample=rollout.sample,
        outcome=rollout.outcome,
        reward=rollout.reward,
        stop_reason=rollout.stop_reason,
        failure_code=rollout.failure_code,
    )
    count_sample(rollout=rollout)
    for node in give_up_sandboxes(owner=rollout_id):
        if sweep:
            publish_sweep(node=node)
    publish_dispatch()
    return True
