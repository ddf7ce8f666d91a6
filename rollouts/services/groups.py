"""New groups with all their rollouts, in one order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from rollouts.models import Experiment, Group
from rollouts.services.messages import publish_dispatch
from rollouts.services.rollout_rows import insert_rollouts


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """A group to be made; `epoch` and `position` are its place in a feed."""

    task: UUID
    environment: UUID
    size: int
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    snapshot: UUID | None = None
    epoch: int | None = None
    position: int | None = None


def add_groups(*, experiment: Experiment, groups: Sequence[NewGroup]) -> list[Group]:
    """Write groups and their queued rollouts, and ask for a dispatch.

    Call in a transaction that holds the experiment's lock: groups start and leave in this order.
    """
    made = Group.objects.bulk_create(
        [
            Group(
                experiment=experiment,
                task_id=each.task,
                environment_id=each.environment,
                size=each.size,
                priority=each.priority,
                metadata=dict(each.metadata),
                snapshot_id=each.snapshot,
                epoch=each.epoch,
                position=each.position,
            )
            for each in groups
        ],
        batch_size=1000,
    )
    insert_rollouts(experiment=experiment, groups=made)
    publish_dispatch()
    return made
