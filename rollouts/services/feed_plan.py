"""Plans of epochs: made once when an epoch begins, then read slice by slice."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Min

from rollouts.feed_options import Curriculum, FeedSettings
from rollouts.models import Experiment, FeedPlan, TaskProgress, TaskSet

ID_BYTES = 16

# The tasks of a set that may be drawn, their ids of 16 bytes in a row, in an order that does not
# depend on the database's collation.
_IDS = """
SELECT coalesce(string_agg(uuid_send(task.id), ''::bytea ORDER BY task.ref COLLATE "C"), ''::bytea)
FROM rollouts_task AS task
WHERE task.task_set_id = %(task_set)s
  AND NOT EXISTS (
      SELECT FROM unnest(%(refs)s::text[]) AS skipped(ref) WHERE skipped.ref = task.ref
  )
  AND NOT EXISTS (
      SELECT FROM unnest(%(ids)s::uuid[]) AS skipped(id) WHERE skipped.id = task.id
  )
"""
_UNLESS_FLAKY = """
  AND (task.flaky_hash = '' OR task.flaky_hash <> task.content_hash)
"""
_UNLESS_OUT = """
  AND NOT EXISTS (
      SELECT FROM rollouts_taskprogress AS progress
      WHERE progress.experiment_id = %(experiment)s AND progress.task_id = task.id
        AND progress.samples >= %(min_samples)s
        AND (progress."right"::float8 / progress.samples) NOT BETWEEN %(low)s AND %(high)s
        AND progress.last_epoch > %(since)s
  )
"""
_SLICE = """
SELECT substring(tasks FROM %(first)s FOR %(bytes)s) FROM rollouts_feedplan
WHERE experiment_id = %(experiment)s AND epoch = %(epoch)s
"""


class NothingToDraw(Exception):
    """The experiment's task sets offer no task at all; the message says why."""


@dataclass(frozen=True)
class Place:
    """A task at its place in the feed."""

    epoch: int
    position: int
    task: UUID


def ensure_plan(*, experiment: Experiment) -> None:
    """Make the plan of the experiment's present epoch unless it is there.

    Takes no lock: of two that are made at once one stays. Raises NothingToDraw.
    """
    epoch = experiment.feed_epoch
    if FeedPlan.objects.filter(experiment=experiment, epoch=epoch).exists():
        return
    # NumPy takes 20 MB: only the process that makes plans loads it.
    from rollouts.feed_order import SetTasks, order_of

    settings = FeedSettings.stored(experiment.feed_settings)
    sets = list(experiment.task_sets.order_by("name"))
    weights = settings.weights
    tasks = [
        SetTasks(each.name, _task_ids(experiment, settings, each), weights.get(each.name, 1.0))
        for each in sets
    ]
    if not any(each.count for each in tasks) and not _is_curriculum_to_blame(
        experiment, settings, sets
    ):
        raise NothingToDraw(_why_nothing(sets))
    order = order_of(tasks, seed=settings.seed, epoch=epoch, shuffle=settings.shuffle)
    with transaction.atomic():
        FeedPlan.objects.bulk_create(
            [
                FeedPlan(
                    experiment=experiment, epoch=epoch, size=len(order) // ID_BYTES, tasks=order
                )
            ],
            ignore_conflicts=True,
        )


def read_slice(*, experiment_id: UUID, epoch: int, position: int, count: int) -> list[Place]:
    """Return up to `count` places of a plan from `position` on; none without the plan."""
    values: dict[str, Any] = {
        "experiment": experiment_id,
        "epoch": epoch,
        "first": position * ID_BYTES + 1,
        "bytes": count * ID_BYTES,
    }
    with connection.cursor() as cursor:
        cursor.execute(_SLICE, values)
        row = cursor.fetchone()
    ids = bytes(row[0]) if row else b""
    return [
        Place(epoch, position + at // ID_BYTES, UUID(bytes=ids[at : at + ID_BYTES]))
        for at in range(0, len(ids), ID_BYTES)
    ]


def following_epoch(*, experiment: Experiment, settings: FeedSettings, is_empty: bool) -> int:
    """Return the epoch to go on with: the next, or that in which the curriculum offers a task."""
    following = experiment.feed_epoch + 1
    if not is_empty or settings.curriculum is None:
        return following
    first = TaskProgress.objects.filter(
        experiment=experiment,
        samples__gte=settings.curriculum.min_samples,
        task__task_set__experiments=experiment,
    ).aggregate(first=Min("last_epoch"))["first"]
    if first is None:
        return following
    return max(following, int(first) + settings.curriculum.revisit_epochs)


def split_skipped(skip: tuple[str, ...]) -> tuple[list[str], list[UUID]]:
    """Return all that is skipped as references, and what of it can be an id as ids."""
    ids = []
    for each in skip:
        try:
            ids.append(UUID(each))
        except ValueError:
            continue
    return list(skip), ids


def _task_ids(
    experiment: Experiment,
    settings: FeedSettings,
    task_set: TaskSet,
    *,
    curriculum: bool = True,
) -> bytes:
    refs, ids = split_skipped(settings.skip)
    values: dict[str, Any] = {"task_set": task_set.pk, "refs": refs, "ids": ids}
    statement = _IDS
    if settings.skip_flaky:
        statement += _UNLESS_FLAKY
    if curriculum and settings.curriculum is not None:
        statement += _UNLESS_OUT
        values |= _bounds(settings.curriculum, experiment)
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        row = cursor.fetchone()
    return bytes(row[0]) if row else b""


def _bounds(curriculum: Curriculum, experiment: Experiment) -> dict[str, Any]:
    return {
        "experiment": experiment.pk,
        "min_samples": curriculum.min_samples,
        "low": curriculum.low,
        "high": curriculum.high,
        "since": experiment.feed_epoch - curriculum.revisit_epochs,
    }


def _is_curriculum_to_blame(
    experiment: Experiment, settings: FeedSettings, sets: list[TaskSet]
) -> bool:
    """Tell whether there would be tasks without the curriculum."""
    if settings.curriculum is None:
        return False
    return any(_task_ids(experiment, settings, each, curriculum=False) for each in sets)


def _why_nothing(sets: list[TaskSet]) -> str:
    if not sets:
        return "waits for task sets: the experiment has none"
    names = ", ".join(each.name for each in sets[:3]) + (", …" if len(sets) > 3 else "")
    if any(each.tasks.exists() for each in sets):
        return f"waits for tasks: what is skipped leaves none of {names}"
    return f"waits for tasks: there are none in {names}"
