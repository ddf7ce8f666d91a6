"""A batch out of an Arrow stream: arrays are views of the answer's own bytes, nothing is copied."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from prorl_client.errors import MissingExtra, UnreadableContent
from prorl_client.trajectories import Segment, Trajectory, Turn

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
BATCH, ROLLOUTS = b"prorl.batch", b"prorl.rollouts"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def is_available() -> bool:
    """Tell whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def read_batch(body: bytes | bytearray) -> tuple[dict[str, Any], list[Trajectory]]:
    """Return the batch's description and its trajectories, in the service's order.

    The arrays keep `body` alive and are views of it. Raises UnreadableContent, MissingExtra.
    """
    pyarrow, ipc = _library()
    if not body.endswith(END_OF_STREAM):  # pyarrow takes a stream that stops between two messages
        raise UnreadableContent("The batch's Arrow stream has no end: it was cut.")
    try:
        with ipc.open_stream(pyarrow.py_buffer(body)) as stream:
            metadata = stream.schema.metadata or {}
            batch = json.loads(metadata[BATCH])
            rollouts = json.loads(metadata[ROLLOUTS])
            segments: dict[str, list[Segment]] = {}
            for rows in stream:
                for rollout, segment in _segments(rows):
                    segments.setdefault(rollout, []).append(segment)
    except (KeyError, ValueError, TypeError, OSError, pyarrow.ArrowException) as fault:
        raise UnreadableContent(f"The batch's Arrow stream cannot be read: {fault!r}.") from fault
    return batch, [Trajectory.parse(each, segments.get(each["rollout"], ())) for each in rollouts]


def _library() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        from pyarrow import ipc
    except ImportError as fault:
        raise MissingExtra("Install pyarrow: pip install 'prorl-client[arrow]'.") from fault
    return pyarrow, ipc


def _segments(rows: Any) -> Iterator[tuple[str, Segment]]:
    """Yield each row's rollout and segment."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    lists = {name: _Lists(columns[name]) for name in _TOKENS}
    plain = {name: column.to_pylist() for name, column in columns.items() if name not in lists}
    for row in range(rows.num_rows):
        yield str(UUID(bytes=plain["rollout"][row])), _segment(row, plain, lists)


_TOKENS: Mapping[str, type[Any]] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "response_mask": np.uint8,
    "response_logprobs": np.float32,
    "policy_versions": np.int64,
    "version_runs": np.int32,
}


def _segment(row: int, plain: Mapping[str, list[Any]], lists: Mapping[str, _Lists]) -> Segment:
    arrays = {name: lists[name].at(row, kind) for name, kind in _TOKENS.items()}
    return Segment(
        id=plain["segment"][row],
        parent=plain["parent"][row],
        fork_reason=plain["fork_reason"][row],
        logprob_mode=plain["logprob_mode"][row] or "",
        version_values=arrays.pop("policy_versions"),
        turns=tuple(_turns(row, plain)),
        sampling=json.loads(plain["sampling"][row] or "{}") if "sampling" in plain else {},
        **arrays,
    ).checked()


def _turns(row: int, plain: Mapping[str, list[Any]]) -> Iterator[Turn]:
    starts, ends = plain["turn_starts"][row], plain["turn_ends"][row]
    nothing = [None] * len(starts)
    reasons = plain["turn_finish_reasons"][row] if "turn_finish_reasons" in plain else nothing
    rewards = plain["turn_rewards"][row] if "turn_rewards" in plain else nothing
    for start, end, reason, reward in zip(starts, ends, reasons, rewards, strict=True):
        yield Turn(start, end, reason, reward)


class _Lists:
    """A list column as one flat array and the places where each list begins."""

    def __init__(self, column: Any) -> None:
        self._offsets = column.offsets.to_numpy(zero_copy_only=True)
        self._values = column.values.to_numpy(zero_copy_only=True)

    def at(self, row: int, kind: type[Any]) -> NDArray[Any]:
        """Return a row's list as a view; it is copied only when it is of another kind."""
        found: NDArray[Any] = self._values[self._offsets[row] : self._offsets[row + 1]]
        return found.astype(kind, copy=False)
