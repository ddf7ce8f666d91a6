"""Taking groups back that have not started: they are drawn again under changed settings."""

from django.db.models import Count, Exists, F, OuterRef
from django.utils import timezone

from rollouts.models import Attempt, Experiment, Group, Rollout
from rollouts.services.events import emit, emit_rollouts_done
from rollouts.services.feed_returns import return_tasks
from rollouts.states import GroupState, Outcome, RolloutState

REASON = "changed"


def withdraw_unstarted(*, experiment: Experiment) -> int:
    """Cancel the pulled groups of which no rollout was ever started; their tasks return.

    Call in a transaction that holds the experiment's lock; locks rollouts, then groups. Returns
    how many groups.
    """
    unstarted = Group.objects.filter(
        experiment=experiment,
        state=GroupState.OPEN,
        started_at__isnull=True,
        position__isnull=False,
    )
    tried = Attempt.objects.filter(rollout=OuterRef("pk"))
    queued = Rollout.objects.filter(
        ~Exists(tried), group__in=unstarted.values("pk"), state=RolloutState.QUEUED
    )
    locked = list(queued.select_for_update(of=("self",)).order_by("pk").values_list("pk"))
    rollouts = Rollout.objects.filter(pk__in=[pk for (pk,) in locked])
    whole = (
        rollouts.order_by()
        .values("group")
        .annotate(count=Count("pk"))
        .filter(count=F("group__size"))
        .values_list("group", flat=True)
    )
    groups = Group.objects.filter(pk__in=list(whole), state=GroupState.OPEN)
    taken = list(groups.select_for_update(no_key=True).order_by("pk"))
    ids = [group.pk for group in taken]
    now = timezone.now()
    rollouts.filter(group__in=ids).update(
        state=RolloutState.DONE, outcome=Outcome.CANCELLED, cancel_requested_at=now, done_at=now
    )
    Group.objects.filter(pk__in=ids).update(state=GroupState.CANCELLED, done_count=F("size"))
    emit_rollouts_done(list(rollouts.filter(group__in=ids).values_list("pk", flat=True)))
    return_tasks(groups=ids, reason=REASON)
    for group in taken:
        emit(experiment.pk, "group.cancelled", group=group.pk, task=group.task_id)
    return len(ids)
