"""Trajectories for the adapters' tests: every kind that a batch can hold."""

from typing import Any

from prorl_client import Trajectory

JSON = dict[str, Any]

CALL: JSON = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
}
TOOL: JSON = {
    "type": "function",
    "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}},
}
TALK: list[JSON] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a b"},
    {"role": "assistant", "content": "Two files."},
]


def segment(**changes: Any) -> JSON:
    """Return two turns with two of the environment's tokens between, and one behind."""
    return {
        "id": 0,
        "parent": None,
        "fork_reason": None,
        "sampling": {"temperature": 0.5},
        "logprob_mode": "processed_logprobs",
        "turns": [
            {"start": 0, "end": 2, "finish_reason": "stop", "reward": 0.25},
            {"start": 4, "end": 7, "finish_reason": "stop", "reward": None},
        ],
        "prompt_ids": [1, 2, 3],
        "response_ids": [11, 12, 90, 91, 13, 14, 15, 92],
        "response_mask": [1, 1, 0, 0, 1, 1, 1, 0],
        "response_logprobs": [-0.5, -0.25, 0.0, 0.0, -1.0, -0.125, -2.0, 0.0],
        "policy_versions": [[3, 4], [4, 4]],
        **changes,
    }


FORK = segment(
    id=1,
    parent=0,
    fork_reason="compacted",
    turns=[{"start": 0, "end": 1, "finish_reason": "stop", "reward": None}],
    prompt_ids=[1, 2, 11, 90],
    response_ids=[16],
    response_mask=[1],
    response_logprobs=[-0.75],
    policy_versions=[[5, 1]],
)
UNSAMPLED = segment(
    id=2, turns=[], response_ids=[90], response_mask=[0], response_logprobs=[0.0],
    policy_versions=[[5, 1]],
)  # fmt: skip


def trajectory(**changes: Any) -> Trajectory:
    """Return a scored trajectory of two turns."""
    return Trajectory.parse(
        {
            "rollout": "r-1",
            "group": "g-1",
            "task": "t-1",
            "task_ref": "ref",
            "sample": 0,
            "environment": "files@1",
            "outcome": "scored",
            "stop_reason": "finished",
            "failure_code": None,
            "reward": 1.0,
            "rewards": {"tests": 1.0},
            "trainable": True,
            "policy_version": {"first": 3, "last": 4},
            "turns": 2,
            "timings": {"run": 2.0, "eval": 0.5, "inference": 1.5, "tools": 0.25},
            "segments": [segment()],
            "messages": TALK,
            "tools": [TOOL],
            "metadata": {},
            **changes,
        }
    )


EMPTY: JSON = {
    "reward": None,
    "rewards": {},
    "trainable": False,
    "segments": [],
    "messages": [],
    "turns": 0,
    "stop_reason": None,
}


def every_kind() -> dict[str, Trajectory]:
    """Return one trajectory of each kind, by name."""
    return {
        "completed": trajectory(),
        "zero": trajectory(reward=0.0),
        "negative": trajectory(reward=-1.0),
        "truncated": trajectory(stop_reason="max_tokens"),
        "forked": trajectory(segments=[segment(), FORK, UNSAMPLED], turns=3),
        "unscored": trajectory(outcome="infra_failed", reward=None, trainable=False),
        "failed": trajectory(**{**EMPTY, "outcome": "infra_failed", "failure_code": "x.y"}),
        "cancelled": trajectory(**{**EMPTY, "outcome": "cancelled"}),
        "text only": trajectory(segments=[], trainable=False),
        "from Arrow": trajectory(messages=None, tools=None),
    }
