"""Trajectories: written and synced before the row says so, read back joined with the score."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from django.core.files.base import ContentFile

from rollouts.exceptions import NotThere
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.models import Rollout
from rollouts.services.finish import StoredTrajectory
from rollouts.states import Outcome
from rollouts.storage import trajectory_storage


def store_trajectory(
    *,
    experiment_id: UUID,
    rollout_id: UUID,
    attempt_id: UUID,
    segments: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    agent: Mapping[str, Any] | None = None,
) -> StoredTrajectory:
    """Write what was sampled to the store; the name is unique by attempt, so no try overwrites.

    `agent` is what the agent counted: malformed actions, calls and errors by tool. The first and
    last versions are those that are known; how many sampled tokens have none is in the file.
    """
    body = json.dumps(
        {
            "segments": list(segments),
            "messages": list(messages),
            "tools": list(tools),
            "agent": dict(agent or {}),
            "unknown_version_tokens": sum(map(_unknown_version_tokens, segments)),
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    name = f"{experiment_id}/{rollout_id.hex[:2]}/{rollout_id}.{attempt_id.hex[:8]}.json"
    path = trajectory_storage().save(name, ContentFile(body))
    versions = [
        version
        for segment in segments
        for version, _run in segment["policy_versions"]
        if version != UNKNOWN_POLICY_VERSION
    ]
    sampled = sum(sum(segment["response_mask"]) for segment in segments)
    return StoredTrajectory(
        path=path,
        size_bytes=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        segments=len(segments),
        prompt_tokens=sum(len(segment["prompt_ids"]) for segment in segments),
        response_tokens=sum(len(segment["response_ids"]) for segment in segments),
        sampled_tokens=sampled,
        trainable=sampled > 0,
        first_policy_version=min(versions, default=None),
        last_policy_version=max(versions, default=None),
    )


def _unknown_version_tokens(segment: Mapping[str, Any]) -> int:
    """Return how many sampled tokens of a segment are of a version that nobody knows."""
    count = place = 0
    for version, run in segment["policy_versions"]:
        if version == UNKNOWN_POLICY_VERSION:
            count += sum(segment["response_mask"][place : place + run])
        place += run
    return count


def read_trajectory(*, rollout: Rollout) -> dict[str, Any]:
    """Return a rollout's trajectory as the API gives it.

    `rollout` comes with its trajectory, group, task and environment selected. Raises NotThere
    when the rollout left none, or its file is missing or damaged.
    """
    stored = getattr(rollout, "trajectory", None)
    if stored is None:
        raise NotThere(
            f"The rollout has no trajectory: it is {rollout.outcome or rollout.state}.",
            code="trajectory.none",
        )
    try:
        with trajectory_storage().open(stored.path, "rb") as stream:
            body = stream.read()
    except FileNotFoundError:
        raise NotThere(
            f"The trajectory's file {stored.path} is missing from the store.",
            code="trajectory.missing",
        ) from None
    if hashlib.sha256(body).hexdigest() != stored.sha256:
        raise NotThere(
            f"The trajectory's file {stored.path} is damaged.", code="trajectory.damaged"
        )
    content = json.loads(body)
    return {
        **describe(rollout),
        "trainable": stored.trainable and rollout.outcome == Outcome.SCORED,
        "policy_version": {
            "first": stored.first_policy_version,
            "last": stored.last_policy_version,
        },
        **content,
        "metadata": rollout.group.metadata,
    }


def describe(rollout: Rollout) -> dict[str, Any]:
    """Return what a trajectory says of its rollout, with or without tokens."""
    return {
        "rollout": str(rollout.id),
        "group": str(rollout.group_id),
        "task": str(rollout.group.task_id),
        "task_ref": rollout.group.task.ref,
        "sample": rollout.sample,
        "environment": rollout.environment.ref,
        "outcome": rollout.outcome,
        "stop_reason": rollout.stop_reason,
        "failure_code": rollout.failure_code or None,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "turns": rollout.turns,
        "timings": rollout.timings,
    }


def empty_trajectory(rollout: Rollout) -> dict[str, Any]:
    """Return the trajectory of a rollout that left none: no segments, not trainable."""
    return {
        **describe(rollout),
        "trainable": False,
        "policy_version": {"first": None, "last": None},
        "unknown_version_tokens": 0,
        "segments": [],
        "messages": [],
        "tools": [],
        "metadata": rollout.group.metadata,
    }


def batch_trajectories(*, batch_id: UUID) -> list[dict[str, Any]]:
    """Return every trajectory of a batch's groups, in group and sample order."""
    rollouts = (
        Rollout.objects.filter(group__batch_id=batch_id)
        .select_related("group__task", "environment", "trajectory")
        .order_by("sequence", "sample")
    )
    return [
        read_trajectory(rollout=rollout)
        if hasattr(rollout, "trajectory")
        else empty_trajectory(rollout)
        for rollout in rollouts
    ]
