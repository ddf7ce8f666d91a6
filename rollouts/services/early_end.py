"""Early termination: once a batch is full, what can no longer enter it is cancelled."""

import logging
from uuid import UUID

from django.db import transaction

from rollouts.feed_options import FeedSettings
from rollouts.models import Experiment, Group, Rollout
from rollouts.selection_options import CANCEL, Selection
from rollouts.services.batch_choice import Wish, next_groups
from rollouts.services.cancel import cancel_rest
from rollouts.services.events import emit
from rollouts.services.feed_returns import return_tasks
from rollouts.services.messages import publish_group_round
from rollouts.states import IN_STAGE, ExperimentState, Feed, GroupState

logger = logging.getLogger(__name__)

REASON = "cancelled"


def cancel_open(*, experiment: Experiment) -> int:
    """Cancel an experiment's open groups; their tasks return. Return how many.

    Call inside a transaction with the experiment's row locked. Their rollouts are cancelled by the
    round that this asks for, once it has committed; samples already finished stay readable.
    """
    still_open = Group.objects.filter(experiment=experiment, state=GroupState.OPEN)
    locked = list(still_open.select_for_update(no_key=True).order_by("pk"))
    ids = [group.pk for group in locked]
    if not ids:
        return 0
    Group.objects.filter(pk__in=ids).update(state=GroupState.CANCELLED)
    return_tasks(groups=ids, reason=REASON)
    for group in locked:
        emit(experiment.pk, "group.cancelled", group=group.pk, task=group.task_id)
    publish_group_round(experiment_id=experiment.pk)
    return len(ids)


def end_early(*, experiment_id: UUID) -> int:
    """Cancel the open groups of a pulling experiment whose next batch is ready; return how many.

    Only where its selection says so. What was pushed is cancelled by the lease itself: only that
    says how large a batch is. In start order no open group stands in front of a batch that is
    ready, so none is cancelled for being slow.
    """
    with transaction.atomic():
        experiment = Experiment.objects.select_for_update(no_key=True).get(pk=experiment_id)
        size = FeedSettings.stored(experiment.feed_settings).batch_groups
        if (
            experiment.feed != Feed.PULL
            or size is None
            or Selection.stored(experiment.selection).unfinished != CANCEL
            or next_groups(experiment=experiment, wish=Wish(groups=size)) is None
        ):
            return 0
        return cancel_open(experiment=experiment)


def end_all_early() -> int:
    """Do so for every active experiment whose selection says so; return how many groups."""
    asking = Experiment.objects.filter(
        state=ExperimentState.ACTIVE, feed=Feed.PULL, selection__unfinished=CANCEL
    )
    count = 0
    for experiment_id in list(asking.order_by("pk").values_list("pk", flat=True)):
        try:
            count += end_early(experiment_id=experiment_id)
        except Exception:
            logger.exception("experiment %s: the next round tries again", experiment_id)
    return count


def cancel_leftovers(*, experiment_id: UUID | None = None) -> int:
    """Cancel what still goes on in groups that were cancelled or filtered; return how many.

    For one experiment queued rollouts are looked at too; for all of them only those in a stage,
    which the slots bound, and then the rest of their groups.
    """
    left = Rollout.objects.filter(
        cancel_requested_at__isnull=True,
        group__state__in=[GroupState.CANCELLED, GroupState.FILTERED],
    )
    if experiment_id is None:
        left = left.filter(state__in=IN_STAGE)
    else:
        left = left.unfinished().filter(experiment_id=experiment_id)
    groups = list(left.order_by().values_list("group_id", flat=True).distinct())
    return sum(cancel_rest(group_id=group_id) for group_id in groups)
