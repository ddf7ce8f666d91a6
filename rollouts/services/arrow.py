"""Segments of a trajectory as Arrow: encoded once when they are stored, sent as they lie there.

A stored file holds one encapsulated IPC message, a record batch with one row for each segment. A
stream is a schema message, any number of such files as they are, and an end: no row is decoded or
copied by Python on its way (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa

# Part of the names of stored files: a change of the columns needs a new one, and files of another
# one are made anew from the JSON when they are asked for.
FORMAT = 1
MEDIA_TYPE = "application/vnd.apache.arrow.stream"
BATCH_KEY = "prorl.batch"
ROLLOUTS_KEY = "prorl.rollouts"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_COLUMNS = pa.schema(
    [
        pa.field("rollout", pa.binary(16), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("parent", pa.int32()),
        pa.field("fork_reason", pa.string()),
        pa.field("logprob_mode", pa.string(), nullable=False),
        pa.field("sampling", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("response_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_versions", pa.list_(pa.int64()), nullable=False),
        pa.field("version_runs", pa.list_(pa.int32()), nullable=False),
        pa.field("turn_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("turn_ends", pa.list_(pa.int32()), nullable=False),
        pa.field("turn_finish_reasons", pa.list_(pa.string()), nullable=False),
        pa.field("turn_rewards", pa.list_(pa.float64()), nullable=False),
    ]
)


class NotEncodable(ValueError):
    """Segments hold what the columns cannot: a token id beyond 32 bits, a field of another kind."""


def encode_segments(*, rollout_id: UUID, segments: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the record batch of a rollout's segments, one row each. Raises NotEncodable."""
    try:
        rows = [_row(rollout_id, segment) for segment in segments]
        columns = [pa.array([row[f.name] for row in rows], type=f.type) for f in _COLUMNS]
        batch = pa.record_batch(columns, schema=_COLUMNS)
    except (pa.ArrowException, OverflowError, TypeError, ValueError, KeyError) as error:
        raise NotEncodable(f"{type(error).__name__}: {error}") from error
    encoded: bytes = batch.serialize().to_pybytes()
    return encoded


def _row(rollout_id: UUID, segment: Mapping[str, Any]) -> dict[str, Any]:
    turns, versions = segment["turns"], segment["policy_versions"]
    return {
        "rollout": rollout_id.bytes,
        "segment": segment["id"],
        **{name: segment[name] for name in _AS_THEY_ARE},
        "sampling": json.dumps(segment["sampling"], separators=(",", ":")),
        "policy_versions": [version for version, _run in versions],
        "version_runs": [run for _version, run in versions],
        **{column: [turn[name] for turn in turns] for column, name in _OF_TURNS.items()},
    }


_AS_THEY_ARE = (
    *("parent", "fork_reason", "logprob_mode"),
    *("prompt_ids", "response_ids", "response_mask", "response_logprobs"),
)
_OF_TURNS = {
    "turn_starts": "start",
    "turn_ends": "end",
    "turn_finish_reasons": "finish_reason",
    "turn_rewards": "reward",
}


def schema_message(*, batch: bytes, rollouts: bytes) -> bytes:
    """Return the message that a stream begins with; it carries the JSON of batch and rollouts."""
    schema = _COLUMNS.with_metadata({BATCH_KEY: batch, ROLLOUTS_KEY: rollouts})
    message: bytes = schema.serialize().to_pybytes()
    return message
