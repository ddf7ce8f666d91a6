"""Tasks whose groups left without being consumed, for no fault of the task: drawn again."""

from collections.abc import Collection
from uuid import UUID

from rollouts.models import FeedReturn, Group


def return_tasks(*, groups: Collection[UUID], reason: str) -> int:
    """Let the tasks of groups be drawn again at their places in the feed; return how many.

    Call inside the transaction that ends the groups. Groups that the feed did not make are left
    out; a place that waits to be drawn again already stays as it is.
    """
    fed = Group.objects.filter(pk__in=groups, epoch__isnull=False, position__isnull=False)
    rows = [
        FeedReturn(
            experiment_id=group.experiment_id,
            epoch=group.epoch or 0,
            position=group.position or 0,
            task_id=group.task_id,
            reason=reason,
        )
        for group in fed.order_by("pk")
    ]
    FeedReturn.objects.bulk_create(rows, batch_size=1000, ignore_conflicts=True)
    return len(rows)
