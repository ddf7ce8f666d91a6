"""Deadlines of groups: a straggler does not hold up its batch for ever."""

import logging
from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef
from django.db.models.functions import Now

from rollouts.models import Group, Rollout
from rollouts.selection_options import Selection
from rollouts.services.cancel import cancel_rest
from rollouts.services.selection import keep_from_trainer, lock_group, too_few
from rollouts.states import GroupState

logger = logging.getLogger(__name__)

MAX_PER_ROUND = 500


def mark_started(*, groups: Collection[UUID]) -> None:
    """Write when groups started and by when they must be done; those marked already keep theirs.

    Call inside the transaction that starts the first of their rollouts.
    """
    fresh = Group.objects.filter(pk__in=groups, started_at__isnull=True)
    locked = fresh.select_for_update(no_key=True, of=("self",)).select_related("experiment")
    by_deadline: dict[float | None, list[UUID]] = {}
    for group in locked.order_by("pk"):
        seconds = Selection.stored(group.experiment.selection).group_deadline_seconds
        by_deadline.setdefault(seconds, []).append(group.pk)
    for seconds, ids in by_deadline.items():
        ends = None if seconds is None else Now() + timedelta(seconds=seconds)
        Group.objects.filter(pk__in=ids).update(started_at=Now(), deadline_at=ends)


def close_overdue_groups() -> int:
    """Close open groups past their deadline, by the database's clock; return how many.

    With enough complete samples the rest is cancelled, and the group goes on to the rules when
    that has ended; else the group is filtered and its task returns to the feed.
    """
    going_on = Rollout.objects.unfinished().filter(
        group=OuterRef("pk"), cancel_requested_at__isnull=True
    )
    overdue = Group.objects.filter(state=GroupState.OPEN, deadline_at__lte=Now())
    ids = overdue.filter(Exists(going_on)).order_by("deadline_at").values_list("pk", flat=True)
    return sum(_close_safely(group_id) for group_id in list(ids[:MAX_PER_ROUND]))


def _close_safely(group_id: UUID) -> int:
    try:
        return _close(group_id)
    except Exception:
        logger.exception("group %s could not be closed now; the next round tries", group_id)
        return 0


def _close(group_id: UUID) -> int:
    with transaction.atomic():
        group = lock_group(group_id=group_id)
        if group.state != GroupState.OPEN:
            return 0
        scored = Rollout.objects.scored().filter(group=group, replaced=False)
        verdict = too_few(group, complete=scored.count(), at_least=1)
        if verdict is not None:
            keep_from_trainer(group=group, verdict=verdict)
    cancel_rest(group_id=group_id)
    logger.info("group %s closed at its deadline", group_id)
    return 1
