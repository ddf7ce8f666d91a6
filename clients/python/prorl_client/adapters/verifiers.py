"""prime-rl: TrainingSamples as its trainer takes them, or verifiers traces for its orchestrator.

Shapes: prime-rl, transports/rollouts/types.py and orchestrator/trajectories.py; verifiers 0.4.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorl_client import Trajectory
from prorl_client.adapters.rows import Row, advantages_of, is_scored, rows_of, status_of
from prorl_client.adapters.turns import turns_of


def sample_fields(
    row: Row, *, env_name: str, advantage: float | None = None, temperature: float = 1.0
) -> dict[str, Any]:
    """Return the fields of a TrainingSample; every list has the length of all its tokens.

    The temperature is what the segment was sampled at, where the format tells it.
    """
    padding = len(row.prompt_ids)
    assert row.segment is not None
    at = float(row.segment.sampling.get("temperature", temperature))
    size = padding + len(row.response_ids)
    mask = [False] * padding + [bool(each) for each in row.loss_mask]
    return {
        "token_ids": row.token_ids,
        "mask": mask,
        "logprobs": [0.0] * padding + row.logprobs,
        "temperatures": [at] * size,
        "env_name": env_name,
        "advantages": None if advantage is None else [advantage if each else 0.0 for each in mask],
    }


def training_samples(
    group: Sequence[Trajectory], *, env_name: str = "", scale_rewards: bool = False
) -> list[dict[str, Any]]:
    """Return the fields of a group's TrainingSamples: one for each segment, none without a reward.

    The advantage is the reward minus the group's mean, over its spread with `scale_rewards`.
    """
    rewards = [each.reward if each.trainable else None for each in group]
    advantages = advantages_of(rewards, scale=scale_rewards)
    return [
        sample_fields(row, env_name=env_name or trajectory.environment, advantage=advantage)
        for trajectory, advantage in zip(group, advantages, strict=True)
        if advantage is not None
        for row in rows_of(trajectory)
    ]


def as_training_samples(group: Sequence[Trajectory], **options: Any) -> list[Any]:
    """Return prime-rl's own structs; see `training_samples`."""
    from prime_rl.transports.rollouts.types import TrainingSample

    return [TrainingSample(**fields) for fields in training_samples(group, **options)]


def trace_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return a rollout in the wire form of a verifiers trace: `WireTrace.model_validate(…)`.

    Each segment is a path of its own from its root, so that every sampled token is trained on in
    one branch. Messages hold the ids alone: the conversation is in the trajectory.
    """
    nodes: list[dict[str, Any]] = []
    for row in rows_of(trajectory) if is_scored(trajectory) else ():
        parent = None
        for turn in turns_of(row):
            nodes.append(_node("user", parent, turn.read_ids, ()))
            nodes.append(_node("assistant", len(nodes) - 1, turn.said_ids, turn.logprobs))
            parent = len(nodes) - 1
    scored = is_scored(trajectory)
    failure = {"type": status_of(trajectory), "message": trajectory.failure_code or "no reward"}
    return {
        "version": 1,
        "id": trajectory.rollout or "none",
        "task": {
            "type": "ProrlTask",
            "data": {"id": trajectory.task_ref, "name": trajectory.environment},
            "key": trajectory.task_ref,
        },
        "agent": {"config": {}},
        "nodes": nodes,
        "rewards": {"reward": {"score": trajectory.reward}} if scored else {},
        "metrics": {f"rewards/{name}": value for name, value in trajectory.rewards.items()},
        "info": {"rollout": trajectory.rollout, "group": trajectory.group},
        "is_completed": True,
        "ok": scored,
        "stop_condition": trajectory.stop_reason,
        "is_timeout": trajectory.stop_reason == "agent_timeout",
        "errors": [] if scored else [failure],
    }


def _node(
    role: str, parent: int | None, ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    sampled = role == "assistant"
    return {
        "parent": parent,
        "message": {"role": role, "content": ""},
        "sampled": sampled,
        "token_ids": list(ids),
        "mask": [sampled] * len(ids),
        "logprobs": list(logprobs),
    }
