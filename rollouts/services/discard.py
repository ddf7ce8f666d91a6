"""Throwing away what an episode left that is to be run again."""

from functools import partial
from uuid import UUID

from django.db import transaction

from rollouts.models import Trajectory
from rollouts.storage import trajectory_storage


def forget_trajectory(*, rollout_id: UUID) -> None:
    """Delete a rollout's trajectory row, and its files once the transaction has committed."""
    stored = Trajectory.objects.filter(rollout_id=rollout_id)
    for paths in list(stored.values_list("path", "arrow_path")):
        for path in filter(None, paths):
            transaction.on_commit(partial(trajectory_storage().delete, path), robust=True)
    Trajectory.objects.filter(rollout_id=rollout_id).delete()
