"""Feeding: an experiment that pulls draws groups from its task sets, as many as it should have.

What returned is drawn first, in its old place; then the epoch's plan goes on. The cursor and the
returns are rows that change in the transaction that makes the groups: whatever dies, no task is
drawn twice and none is lost.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any
from uuid import UUID

from django.db import transaction

from rollouts.feed_options import FeedSettings
from rollouts.models import Experiment, FeedPlan, FeedReturn, Task
from rollouts.services.feed_plan import (
    NothingToDraw,
    Place,
    ensure_plan,
    following_epoch,
    read_slice,
    split_skipped,
)
from rollouts.services.groups import NewGroup, add_groups
from rollouts.services.messages import publish_feed
from rollouts.services.pacing import Standing, describe, room_for, standing_of
from rollouts.states import ExperimentState, Feed, Purpose

logger = logging.getLogger(__name__)

# Of one round; what is left is the next round's.
STEPS = 16
GROUPS_PER_STEP = 1000
ROLLOUTS_PER_STEP = 20_000
DETAIL = 300


class _Next(Enum):
    """What follows a step: nothing, another draw, or another draw once there is a plan."""

    REST = "rest"
    DRAW = "draw"
    PLAN = "plan"


def feed_all() -> int:
    """Feed every experiment that pulls; return how many groups were started."""
    pulling = Experiment.objects.filter(state=ExperimentState.ACTIVE, feed=Feed.PULL)
    # An evaluation goes through its tasks once.
    fed = pulling.exclude(purpose=Purpose.EVALUATION, feed_epoch__gte=1).order_by("created_at")
    started = 0
    for experiment_id in list(fed.values_list("pk", flat=True)):
        try:
            started += feed_experiment(experiment_id=experiment_id)
        except Exception:
            logger.exception("experiment %s could not be fed; the next round tries", experiment_id)
    return started


def feed_experiment(*, experiment_id: UUID) -> int:
    """Start the groups that an experiment should have now; return how many. Any number at once.

    Locks the experiment for each step. Does nothing for one that does not pull or is not active.
    """
    started, nothing = 0, ""
    for _ in range(STEPS):
        count, following = _step(experiment_id, nothing)
        started += count
        if following == _Next.REST:
            return started
        if following == _Next.PLAN:
            try:
                ensure_plan(experiment=Experiment.objects.get(pk=experiment_id))
            except NothingToDraw as reason:
                nothing = str(reason)
    publish_feed(experiment_id=experiment_id)
    return started


def is_exhausted(experiment: Experiment) -> bool:
    """Tell whether the feed has nothing more: what is coming is all that comes.

    One query, unless the row was read with `has_returns`, for a feed that is used up; else none.
    """
    if experiment.feed != Feed.PULL:
        return False
    if not _is_used_up(experiment, FeedSettings.stored(experiment.feed_settings)):
        return False
    returned: bool | None = getattr(experiment, "has_returns", None)
    return not (experiment.returns.exists() if returned is None else returned)


def _is_used_up(experiment: Experiment, settings: FeedSettings) -> bool:
    return settings.epochs is not None and experiment.feed_epoch >= settings.epochs


def _step(experiment_id: UUID, nothing: str) -> tuple[int, _Next]:
    """Draw once under the lock; return how many groups started, and what is to be done next.

    `nothing` says why no plan can be made; then only what returned is drawn.
    """
    with transaction.atomic():
        experiment = Experiment.objects.select_for_update(no_key=True).get(pk=experiment_id)
        if experiment.state != ExperimentState.ACTIVE or experiment.feed != Feed.PULL:
            return 0, _Next.REST
        before = _cursor(experiment)
        settings = FeedSettings.stored(experiment.feed_settings)
        standing = standing_of(experiment=experiment)
        room = _room(experiment, settings, standing)
        bound = max(1, ROLLOUTS_PER_STEP // experiment.group_size)
        wanted = min(room, bound, GROUPS_PER_STEP)
        places = _draw_returned(experiment, wanted)
        following = _Next.REST
        if not nothing and len(places) < wanted:
            planned, following = _draw_planned(experiment, settings, wanted - len(places))
            places += planned
        started = _start(experiment, settings, places)
        drawn = len(places)
        if following == _Next.REST and (drawn > started or 0 < drawn == wanted < room):
            following = _Next.DRAW
        if following == _Next.REST:
            now = replace(standing, coming=standing.coming + started)
            experiment.feed_detail = nothing or _detail(experiment, settings, now)
        if _cursor(experiment) != before:
            Experiment.objects.filter(pk=experiment.pk).update(**_cursor(experiment))
    return started, following


def _cursor(experiment: Experiment) -> dict[str, Any]:
    return {
        "feed_epoch": experiment.feed_epoch,
        "feed_position": experiment.feed_position,
        "feed_detail": experiment.feed_detail[:DETAIL],
    }


def _room(experiment: Experiment, settings: FeedSettings, standing: Standing) -> int:
    """Return how many groups may start; all there are of an evaluation."""
    if experiment.purpose == Purpose.EVALUATION:
        return sys.maxsize
    return room_for(lag=experiment.max_policy_lag, settings=settings, standing=standing)


def _detail(experiment: Experiment, settings: FeedSettings, standing: Standing) -> str:
    if _is_used_up(experiment, settings) and _room(experiment, settings, standing):
        return f"epoch {settings.epochs} of {settings.epochs} is used up"
    return describe(lag=experiment.max_policy_lag, settings=settings, standing=standing)


def _draw_returned(experiment: Experiment, count: int) -> list[Place]:
    """Take what returned out of the feed, the oldest place first."""
    if count <= 0:
        return []
    rows = list(
        FeedReturn.objects.select_for_update()
        .filter(experiment=experiment)
        .order_by("epoch", "position")[:count]
    )
    FeedReturn.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return [Place(row.epoch, row.position, row.task_id) for row in rows]


def _draw_planned(
    experiment: Experiment, settings: FeedSettings, count: int
) -> tuple[list[Place], _Next]:
    """Move the cursor on by up to `count` places of the present epoch's plan, if there is one.

    A plan is made when its first place is drawn, not before: until then progress counts for it.
    """
    if _is_used_up(experiment, settings):
        return [], _Next.REST
    plan = FeedPlan.objects.filter(experiment=experiment, epoch=experiment.feed_epoch)
    size = plan.values_list("size", flat=True).first()
    if size is None:
        return [], _Next.PLAN
    places = read_slice(
        experiment_id=experiment.pk,
        epoch=experiment.feed_epoch,
        position=experiment.feed_position,
        count=count,
    )
    experiment.feed_position += len(places)
    if experiment.feed_position < size:
        return places, _Next.REST
    experiment.feed_epoch = following_epoch(
        experiment=experiment, settings=settings, is_empty=size == 0
    )
    if settings.epochs is not None:
        experiment.feed_epoch = min(experiment.feed_epoch, settings.epochs)
    experiment.feed_position = 0
    FeedPlan.objects.filter(experiment=experiment, epoch__lt=experiment.feed_epoch).delete()
    return places, _Next.REST if len(places) == count else _Next.DRAW


def _start(experiment: Experiment, settings: FeedSettings, places: Sequence[Place]) -> int:
    """Make the groups of what was drawn; tasks that are there no longer are passed over."""
    if not places:
        return 0
    refs, ids = split_skipped(settings.skip)
    offered = (
        Task.objects.filter(
            pk__in={place.task for place in places}, task_set__experiments=experiment
        )
        .exclude(ref__in=refs)
        .exclude(pk__in=ids)
    )
    if settings.skip_flaky:
        offered = offered.steady()
    tasks = dict(offered.values_list("pk", "environment_id"))
    groups = [
        NewGroup(
            task=place.task,
            environment=tasks[place.task],
            size=experiment.group_size,
            epoch=place.epoch,
            position=place.position,
        )
        for place in places
        if place.task in tasks
    ]
    if groups:
        add_groups(experiment=experiment, groups=groups)
    return len(groups)
