"""Throwing away what an episode left that is to be run again."""

from functools import partial
from uuid import UUID

from django.db import transaction

from rollouts.models import Trajectory
from rollouts.storage import trajectory_storage


def forget_trajectory(*, rollout_id: UUID) -> None:
    """Delete a rollout's trajectory row, and its file once the transaction has committed."""
    for path in list(
        Trajectory.objects.filter(rollout_id=rollout_id).values_list("path", flat=True)
    ):
        transaction.on_commit(partial(trajectory_storage().delete, path), robust=True)
    Trajectory.objects.filter(rollout_id=rollout_id).delete()
