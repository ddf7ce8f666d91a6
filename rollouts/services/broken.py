"""Refuse to run on environments that a verification found broken, unless that is wanted."""

from collections.abc import Iterable, Sequence

from rollouts.exceptions import StateConflict
from rollouts.models import TaskSet
from sandboxes.models import Environment
from sandboxes.states import Verified

NAMED = 3


def refuse_broken_sets(*, task_sets: Sequence[TaskSet]) -> None:
    """Raise StateConflict when a task of these sets has a broken environment."""
    if not task_sets:
        return
    broken = Environment.objects.filter(
        verification=Verified.BROKEN, tasks__task_set__in=list(task_sets)
    )
    refuse_broken(broken.distinct().order_by("name", "version")[: NAMED + 1])


def refuse_broken(environments: Iterable[Environment], *, where: str = "") -> None:
    """Raise StateConflict when one of these environments is broken; `where` begins the message."""
    refs = sorted({each.ref for each in environments if each.verification == Verified.BROKEN})
    if not refs:
        return
    names = ", ".join(refs[:NAMED]) + (", …" if len(refs) > NAMED else "")
    raise StateConflict(
        f"{where}A verification found {names} broken: read its report, make a version that "
        'works and move the tasks to it, verify again, or send "force": true with the experiment.',
        code="environment.broken",
    )
