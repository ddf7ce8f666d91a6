"""Surfaces for tests, and rollouts that end as a line would end them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.db import transaction
from django.utils import timezone

from rollouts.models import Policy, Rollout, Trajectory
from rollouts.services.end import end_rollout
from rollouts.services.trajectories import store_trajectory
from tests import factories

JSON = dict[str, Any]


def write_surface(folder: Path, policy: Policy, **changes: Any) -> str:
    """Write the file of a surface; return its path."""
    values = {"policy": policy.name, "timeout_seconds": 100, **changes}
    path = folder / "surface.json"
    path.write_text(json.dumps(values))
    return str(path)


def finish(rollout: Rollout, became: Mapping[str, Any]) -> None:
    """End a rollout as `became` says: its columns, trajectory, evaluation and failed try."""
    columns = dict(became.get("columns", {}))
    content = became.get("trajectory")
    with transaction.atomic():
        if "timings" in columns:
            Rollout.objects.filter(pk=rollout.pk).update(timings=columns.pop("timings"))
        if "failed_stage" in became:
            factories.make_attempt(
                rollout=rollout,
                stage=became["failed_stage"],
                state="failed",
                ended_at=timezone.now(),
            )
        if content is not None:
            stored = store_trajectory(
                experiment_id=rollout.experiment_id,
                rollout_id=rollout.pk,
                attempt_id=uuid4(),
                segments=content["segments"],
                messages=content["messages"],
                tools=content.get("tools", []),
            )
            Trajectory.objects.create(rollout=rollout, **vars(stored))
        if "details" in became:
            rollout.evaluations.create(evaluator="exact", details=became["details"])
        assert end_rollout(rollout_id=rollout.pk, **columns)
