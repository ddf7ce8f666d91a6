"""Answers of the service as its API words them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import numpy as np

from tests.clients.scripted import Reply

NOW = datetime(2026, 11, 30, 10, 0, tzinfo=timezone.utc)
EXPERIMENT, BATCH, POLICY = "e1", "00000000-0000-0000-0000-00000000000b", "p1"
BATCHES = f"/experiments/{EXPERIMENT}/batches/"


def rollout_id(number: int) -> str:
    """Return the id of a rollout."""
    return f"00000000-0000-0000-0000-{number:012d}"


def experiment(**values: Any) -> dict[str, Any]:
    """Return an experiment."""
    return {
        "id": EXPERIMENT,
        "name": "demo",
        "policy": "tiny",
        "policy_version": 3,
        "state": "active",
        "feed": "push",
        "group_size": 2,
        "created_at": "2026-11-30T10:00:00.123456Z",
        **values,
    }


def segment(tokens: int = 3, number: int = 0) -> dict[str, Any]:
    """Return a segment in which the last token is the environment's."""
    return {
        "id": number,
        "parent": None,
        "fork_reason": None,
        "sampling": {"temperature": 1.0},
        "logprob_mode": "sampled",
        "turns": [{"start": 0, "end": tokens - 1, "finish_reason": "stop", "reward": None}],
        "prompt_ids": [1, 2],
        "response_ids": list(range(10, 10 + tokens)),
        "response_mask": [1] * (tokens - 1) + [0],
        "response_logprobs": [-0.5] * (tokens - 1) + [0.0],
        "policy_versions": [[3, tokens - 1], [4, 1]],
    }


def trajectory(number: int, *, group: str = "g1", **values: Any) -> dict[str, Any]:
    """Return a trajectory."""
    return {
        "rollout": rollout_id(number),
        "group": group,
        "task": "t1",
        "task_ref": "sum",
        "sample": number,
        "environment": "calc@2",
        "outcome": "scored",
        "stop_reason": "finished",
        "failure_code": None,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "trainable": True,
        "policy_version": {"first": 3, "last": 4},
        "unknown_version_tokens": 0,
        "turns": 1,
        "timings": {"run": 0.5},
        "segments": [segment()],
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [],
        "metadata": {},
        **values,
    }


def batch(**values: Any) -> dict[str, Any]:
    """Return a batch without its trajectories."""
    return {
        "id": BATCH,
        "experiment": EXPERIMENT,
        "state": "leased",
        "number": 1,
        "group_count": 1,
        "policy_version": 4,
        "lease_expires_at": "2026-11-30T10:15:00Z",
        "created_at": "2026-11-30T10:00:00Z",
        "closed_at": None,
        **values,
    }


def lease_headers(seconds: float = 900.0) -> dict[str, str]:
    """Return the headers of a lease that ends so long after the answer's own date."""
    ends = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    return {"Batch-Id": BATCH, "Batch-Lease-Expires": format_datetime(ends, usegmt=True)}


def json_batch(*trajectories: dict[str, Any], seconds: float = 900.0, **values: Any) -> Reply:
    """Return a batch as JSON."""
    body = {**batch(**values), "trajectories": list(trajectories)}
    return Reply(body=body, headers=lease_headers(seconds))


def ndjson_batch(*trajectories: dict[str, Any]) -> Reply:
    """Return a batch as lines."""
    body = b"".join(json.dumps(each).encode() + b"\n" for each in trajectories)
    return Reply(body=body, headers=lease_headers(), content_type="application/x-ndjson")


def arrow_batch(*trajectories: dict[str, Any], **values: Any) -> Reply:
    """Return a batch as an Arrow stream: a row for each segment, the rest in the metadata."""
    body = arrow_stream(batch(**values), trajectories)
    kind = "application/vnd.apache.arrow.stream"
    return Reply(body=body, headers=lease_headers(), content_type=kind)


def arrow_stream(description: dict[str, Any], trajectories: Any) -> bytes:
    """Return the bytes of an Arrow stream of a batch."""
    from uuid import UUID

    import pyarrow as pa
    from pyarrow import ipc

    tokens = {
        "prompt_ids": pa.int32(),
        "response_ids": pa.int32(),
        "response_mask": pa.uint8(),
        "response_logprobs": pa.float32(),
        "policy_versions": pa.int64(),
        "version_runs": pa.int32(),
        "turn_starts": pa.int32(),
        "turn_ends": pa.int32(),
    }
    described = [
        {
            name: each
            for name, each in whole.items()
            if name not in ("segments", "messages", "tools")
        }
        for whole in trajectories
    ]
    metadata = {"prorl.batch": json.dumps(description), "prorl.rollouts": json.dumps(described)}
    schema = pa.schema(
        [
            pa.field("rollout", pa.binary(16), nullable=False),
            pa.field("segment", pa.int32(), nullable=False),
            pa.field("parent", pa.int32()),
            *(pa.field(name, pa.list_(kind)) for name, kind in tokens.items()),
            pa.field("sampling", pa.string()),
            pa.field("turn_finish_reasons", pa.list_(pa.string())),
            pa.field("turn_rewards", pa.list_(pa.float64())),
            pa.field("logprob_mode", pa.string()),
            pa.field("fork_reason", pa.string()),
        ],
        metadata=metadata,
    )
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as stream:
        for whole in trajectories:
            rows = [
                {
                    **each,
                    "rollout": UUID(whole["rollout"]).bytes,
                    "segment": each["id"],
                    "policy_versions": [version for version, _run in each["policy_versions"]],
                    "version_runs": [run for _version, run in each["policy_versions"]],
                    "turn_starts": [turn["start"] for turn in each["turns"]],
                    "turn_ends": [turn["end"] for turn in each["turns"]],
                    "turn_finish_reasons": [turn["finish_reason"] for turn in each["turns"]],
                    "turn_rewards": [turn["reward"] for turn in each["turns"]],
                    "sampling": json.dumps(each["sampling"]),
                }
                for each in whole["segments"]
            ]
            if rows:
                columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema]
                stream.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def same_tokens(found: Any, expected: dict[str, Any]) -> None:
    """Assert that a segment has exactly the tokens of its JSON form."""
    for name, kind in (
        ("prompt_ids", np.int32),
        ("response_ids", np.int32),
        ("response_mask", np.uint8),
        ("response_logprobs", np.float32),
    ):
        array = getattr(found, name)
        assert array.dtype == kind
        assert array.tolist() == expected[name]
    versions = [version for version, run in expected["policy_versions"] for _ in range(run)]
    assert found.policy_versions.dtype == np.int64
    assert found.policy_versions.tolist() == versions
