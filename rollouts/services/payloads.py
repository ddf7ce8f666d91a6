"""Trajectories on their way to a trainer: stored bytes pass through, memory stays bounded.

Rollouts are read in pages, and no connection is held between. One whose stored tokens cannot be
read comes without tokens, not trainable, and with an `error` that says why: it must not hold up
the rest.
"""

import json
import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any
from uuid import UUID

from rollouts.exceptions import NotThere
from rollouts.models import Rollout
from rollouts.querysets import RolloutQuerySet
from rollouts.services import arrow
from rollouts.services.trajectories import (
    describe,
    describe_tokens,
    empty_trajectory,
    read_arrow,
    read_body,
)
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

ROLLOUTS_AT_ONCE = 256
CHUNK_BYTES = 256 * 1024


def rollouts_of_batch(batch_id: UUID) -> RolloutQuerySet:
    """Return a batch's rollouts in group and sample order; what was replaced is in no batch."""
    return Rollout.objects.filter(group__batch_id=batch_id, replaced=False).order_by(
        "sequence", "sample"
    )


def json_trajectories(rollouts: RolloutQuerySet) -> Iterator[bytes]:
    """Yield the JSON of each trajectory, in the rollouts' order; they are fixed by the first.

    The stored JSON is not read as such: it is put between what the rows say, byte by byte.
    """
    for rollout in _rollouts(_ids(rollouts)):
        yield _json(rollout)


def arrow_stream(rollouts: RolloutQuerySet, *, batch: bytes) -> Iterator[bytes]:
    """Yield an Arrow stream of the trajectories' segments, in the rollouts' order.

    `batch` is JSON that its schema's metadata carries beside the description of each rollout.
    Each file is checked before anything is sent, so that the descriptions can tell what is missing.
    """
    ids = _ids(rollouts)
    parts: list[bytes] = []
    lost: set[UUID] = set()
    for rollout in _rollouts(ids):
        described = _described(rollout)
        if "error" in described:
            lost.add(rollout.pk)
        parts.append(encode(described))
    yield arrow.schema_message(batch=batch, rollouts=b"[" + b",".join(parts) + b"]")
    del parts
    for rollout in _rollouts(ids):
        if rollout.pk not in lost and _segments(rollout):
            try:
                yield read_arrow(rollout.trajectory)
            except NotThere as problem:
                logger.error("%s: %s", problem.code, problem)  # since it was checked
    yield arrow.END_OF_STREAM


def in_chunks(parts: Iterator[bytes], size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the same bytes in pieces of at least `size`, but for the last: each costs a hop."""
    waiting: list[bytes] = []
    length = 0
    for part in parts:
        waiting.append(part)
        length += len(part)
        if length >= size:
            yield b"".join(waiting) if len(waiting) > 1 else part
            waiting, length = [], 0
    if length:
        yield b"".join(waiting)


def between(head: bytes, parts: Iterator[bytes], tail: bytes) -> Iterator[bytes]:
    """Yield a JSON list's members between its two ends."""
    members = (b"," + part if place else part for place, part in enumerate(parts))
    return chain((head,), members, (tail,))


def encode(value: Any) -> bytes:
    """Return a value's JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _ids(rollouts: RolloutQuerySet) -> list[UUID]:
    return list(rollouts.values_list("pk", flat=True))


def _rollouts(ids: list[UUID]) -> Iterator[Rollout]:
    """Yield rollouts with all that describes them, page by page; deleted ones are left out."""
    wanted = Rollout.objects.select_related("group__task", "environment", "trajectory").defer(
        "last_message", "answer", "group__task__instruction", "group__task__hidden"
    )
    for start in range(0, len(ids), ROLLOUTS_AT_ONCE):
        page = ids[start : start + ROLLOUTS_AT_ONCE]
        found = wanted.in_bulk(page)
        release_connection()
        for rollout_id in page:
            if rollout_id in found:
                yield found.pop(rollout_id)


def _segments(rollout: Rollout) -> int:
    return rollout.trajectory.segments if hasattr(rollout, "trajectory") else 0


def _json(rollout: Rollout) -> bytes:
    if not hasattr(rollout, "trajectory"):
        return encode(empty_trajectory(rollout))
    try:
        body = read_body(rollout.trajectory)
    except NotThere as problem:
        return encode({**empty_trajectory(rollout), "error": _error(problem)})
    row = encode({**describe(rollout), **describe_tokens(rollout, rollout.trajectory)})
    metadata = encode(rollout.group.metadata)
    return b"".join((row[:-1], b",", body[1:-1], b',"metadata":', metadata, b"}"))


def _described(rollout: Rollout) -> dict[str, Any]:
    """Return what a stream's metadata say of a rollout; its file is checked on the way."""
    described = {key: value for key, value in empty_trajectory(rollout).items() if key not in _TEXT}
    if not _segments(rollout):
        return {**described, "segments": 0}
    try:
        read_arrow(rollout.trajectory)
    except NotThere as problem:
        return {**described, "segments": 0, "error": _error(problem)}
    tokens = describe_tokens(rollout, rollout.trajectory)
    return {**described, **tokens, "segments": _segments(rollout)}


# What only the JSON of a trajectory holds.
_TEXT = ("messages", "tools", "unknown_version_tokens")


def _error(problem: NotThere) -> dict[str, str]:
    logger.error("%s: %s", problem.code, problem)
    return {"code": problem.code, "detail": str(problem)}
