"""Trying again what ended without a score, as long as no trainer has been given it."""

from uuid import UUID

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from rollouts.exceptions import NotThere, StateConflict
from rollouts.models import Attempt, Experiment, Group, Rollout
from rollouts.services.discard import forget_trajectory
from rollouts.services.messages import publish_dispatch, publish_sweep
from rollouts.states import ExperimentState, GroupState, Outcome, RolloutState
from sandboxes.services.lifecycle import give_up_sandboxes

RETRIABLE = (Outcome.INFRA_FAILED, Outcome.TIMED_OUT, Outcome.CANCELLED)


def retry_rollout(*, rollout_id: UUID) -> None:
    """Send a rollout that ended without a score back to the queue, its result forgotten.

    Its attempts stay as history; tries and times are counted anew from here.
    Locks its experiment, the rollout, its attempts and its group, in this order. Raises NotThere,
    or StateConflict when it is not done or was scored, its group was cancelled or given to a
    trainer, or its experiment was stopped.
    """
    with transaction.atomic():
        # First, as a lease does: it holds the experiment while it waits for groups.
        experiment = (
            Experiment.objects.select_for_update(no_key=True).filter(rollouts=rollout_id).first()
        )
        if experiment is None:
            raise NotThere("There is no such rollout.")
        rollout = Rollout.objects.select_for_update().get(pk=rollout_id)
        list(Attempt.objects.select_for_update().filter(rollout=rollout).order_by("pk"))
        group = Group.objects.select_for_update().get(pk=rollout.group_id)
        _refuse_what_cannot(rollout, group, experiment)
        won = Rollout.objects.filter(
            pk=rollout_id, state=RolloutState.DONE, outcome__in=RETRIABLE
        ).update(
            state=RolloutState.QUEUED,
            outcome=None,
            stop_reason=None,
            failure_code="",
            failure_detail="",
            reward=None,
            rewards={},
            node=None,
            cancel_requested_at=None,
            not_before=None,
            restarts=F("restarts") + 1,
            turns=0,
            sampled_tokens=0,
            tool_calls=0,
            answer=None,
            last_message="",
            timings={},
            queued_at=timezone.now(),
            retried_at=timezone.now(),
            done_at=None,
        )
        if not won:
            raise StateConflict("The rollout changed meanwhile; look again.")
        forget_trajectory(rollout_id=rollout.pk)
        Group.objects.filter(pk=group.pk).update(
            done_count=F("done_count") - 1,
            state=GroupState.OPEN,
            ready_at=None,
            # It is no longer what a trainer was given before, and its time begins anew.
            last_batch=None,
            started_at=None,
            deadline_at=None,
        )
        for node in give_up_sandboxes(owner=rollout_id):
            publish_sweep(node=node)
        publish_dispatch()


def _refuse_what_cannot(rollout: Rollout, group: Group, experiment: Experiment) -> None:
    if rollout.state != RolloutState.DONE:
        raise StateConflict(
            f"The rollout is in {rollout.state}; only what is done can be tried again.",
            code="rollout.not_done",
        )
    if rollout.outcome not in RETRIABLE:
        raise StateConflict(
            f"The rollout was {rollout.outcome}; its result stands.", code="rollout.scored"
        )
    if rollout.replaced:
        raise StateConflict(
            "Another sample took its place; retry that one.", code="rollout.replaced"
        )
    if group.state not in (GroupState.OPEN, GroupState.READY):
        raise StateConflict(
            f"Its group is {group.state}; submit the task again.", code=f"group.{group.state}"
        )
    if experiment.state == ExperimentState.STOPPED:
        raise StateConflict(
            "The experiment was stopped; create a new one.", code="experiment.stopped"
        )
