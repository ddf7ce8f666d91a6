"""Trajectories: written and synced before the row says so, read back joined with the score."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from django.core.files.base import ContentFile

from rollouts.exceptions import NotThere
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.models import Rollout, Trajectory
from rollouts.services import arrow
from rollouts.services.finish import StoredTrajectory
from rollouts.states import Outcome
from rollouts.storage import trajectory_storage

logger = logging.getLogger(__name__)


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

    It is written twice: as JSON with everything, and its segments as Arrow, which leave the service
    as they lie there. The name of the second carries the digest of what is in it.

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
    name = f"{experiment_id}/{rollout_id.hex[:2]}/{rollout_id}.{attempt_id.hex[:8]}"
    arrow_path, arrow_bytes = _store_arrow(name, rollout_id, segments)
    path = trajectory_storage().save(f"{name}.json", ContentFile(body))
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
        arrow_path=arrow_path,
        arrow_bytes=arrow_bytes,
        segments=len(segments),
        prompt_tokens=sum(len(segment["prompt_ids"]) for segment in segments),
        response_tokens=sum(len(segment["response_ids"]) for segment in segments),
        sampled_tokens=sampled,
        trainable=sampled > 0,
        first_policy_version=min(versions, default=None),
        last_policy_version=max(versions, default=None),
    )


def reward_turns(
    *, rollout: Rollout, attempt_id: UUID, rewards: Sequence[float | None]
) -> StoredTrajectory | None:
    """Write a trajectory anew, each of its turns with the reward that an evaluator gave it.

    `rewards` are in the order in which turns were sampled; None, and nothing is written, where the
    trajectory has another number of turns. Raises NotThere as `read_body` does.
    """
    content = json.loads(read_body(rollout.trajectory))
    turns = [turn for segment in content["segments"] for turn in segment["turns"]]
    if len(turns) != len(rewards):
        return None
    for turn, reward in zip(turns, rewards, strict=True):
        turn["reward"] = reward
    return store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.pk,
        attempt_id=attempt_id,
        **{name: content[name] for name in ("segments", "messages", "tools", "agent")},
    )


def forget_files(stored: Trajectory) -> None:
    """Delete the files of a trajectory that was written anew; what fails is left there."""
    for path in filter(None, (stored.path, stored.arrow_path)):
        try:
            trajectory_storage().delete(path)
        except OSError:
            logger.exception("%s is left in the store", path)


def _store_arrow(
    name: str, rollout_id: UUID, segments: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    """Write the segments as Arrow; return the file's name and size, or ("", 0) without any."""
    if not segments:
        return "", 0
    try:
        body = arrow.encode_segments(rollout_id=rollout_id, segments=segments)
    except arrow.NotEncodable as problem:
        logger.warning(
            "the trajectory of rollout %s is stored as JSON only: %s", rollout_id, problem
        )
        return "", 0
    full = f"{name}.{arrow.FORMAT}-{hashlib.sha256(body).hexdigest()}.arrow"
    return trajectory_storage().save(full, ContentFile(body)), len(body)


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
    content = json.loads(read_body(stored))
    return {
        **describe(rollout),
        **describe_tokens(rollout, stored),
        **content,
        "metadata": rollout.group.metadata,
    }


def read_body(stored: Trajectory) -> bytes:
    """Return the stored JSON, checked. Raises NotThere when it is missing or damaged."""
    body = _read(stored.path)
    if hashlib.sha256(body).hexdigest() != stored.sha256:
        raise NotThere(
            f"The trajectory's file {stored.path} is damaged.", code="trajectory.damaged"
        )
    return body


def read_arrow(stored: Trajectory) -> bytes:
    """Return the segments as one Arrow record batch, checked; made of the JSON where it must be.

    That is so for what was stored before there were any, in another format, or is damaged. Raises
    NotThere when the JSON cannot be read either, or does not fit Arrow.
    """
    if names_this_format(stored.arrow_path):
        try:
            body = _read(stored.arrow_path)
            if hashlib.sha256(body).hexdigest() == _digest_in(stored.arrow_path):
                return body
            logger.error("trajectory.damaged: %s", stored.arrow_path)
        except NotThere as problem:
            logger.error("%s: %s", problem.code, problem)
    segments = json.loads(read_body(stored))["segments"]
    try:
        return arrow.encode_segments(rollout_id=stored.rollout_id, segments=segments)
    except arrow.NotEncodable as problem:
        raise NotThere(
            f"The trajectory does not fit Arrow's columns, ask for JSON: {problem}",
            code="trajectory.not_arrow",
        ) from None


def names_this_format(path: str) -> bool:
    """Tell whether a file is named as one of the present Arrow columns."""
    return _last_part(path).startswith(f"{arrow.FORMAT}-")


def _last_part(path: str) -> str:
    """Return what stands between the last two dots of a name: FORMAT-DIGEST."""
    return PurePosixPath(path).stem.rpartition(".")[2]


def _digest_in(path: str) -> str:
    return _last_part(path).partition("-")[2]


def _read(path: str) -> bytes:
    try:
        with trajectory_storage().open(path, "rb") as stream:
            body: bytes = stream.read()
            return body
    except FileNotFoundError:
        raise NotThere(
            f"The trajectory's file {path} is missing from the store.", code="trajectory.missing"
        ) from None
    except OSError as fault:
        raise NotThere(
            f"The trajectory's file {path} cannot be read: {fault.strerror}.",
            code="trajectory.unreadable",
        ) from None


def describe_tokens(rollout: Rollout, stored: Trajectory) -> dict[str, Any]:
    """Return what is known of a trajectory's tokens without reading them."""
    return {
        "trainable": stored.trainable and rollout.outcome == Outcome.SCORED,
        "policy_version": {
            "first": stored.first_policy_version,
            "last": stored.last_policy_version,
        },
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
