"""JSON as it was sent at first: each stored file parsed, joined with its row, written again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import msgspec
from django.http import HttpRequest, StreamingHttpResponse

from rollouts.api.streams import asynchronously
from rollouts.models import Rollout
from rollouts.services.payloads import rollouts_of_batch
from rollouts.services.trajectories import describe, describe_tokens, read_body

PAGE = 32


async def parsed_and_written(_request: HttpRequest, batch_id: UUID) -> StreamingHttpResponse:
    """Answer with the module `json`."""
    return StreamingHttpResponse(asynchronously(_parts(batch_id, json.loads, _dumps)))


async def by_msgspec(_request: HttpRequest, batch_id: UUID) -> StreamingHttpResponse:
    """Answer with msgspec."""
    parts = _parts(batch_id, msgspec.json.decode, msgspec.json.encode)
    return StreamingHttpResponse(asynchronously(parts))


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _parts(
    batch_id: UUID, parse: Callable[[bytes], Any], write: Callable[[Any], bytes]
) -> Iterator[bytes]:
    ids = list(rollouts_of_batch(batch_id).values_list("pk", flat=True))
    yield b'{"trajectories":['
    for start in range(0, len(ids), PAGE):
        wanted = ids[start : start + PAGE]
        rows = Rollout.objects.select_related("group__task", "environment", "trajectory")
        found = rows.in_bulk(wanted)
        for place, rollout_id in enumerate(wanted, start=start):
            rollout = found[rollout_id]
            stored = rollout.trajectory
            whole = {
                **describe(rollout),
                **describe_tokens(rollout, stored),
                **parse(read_body(stored)),
                "metadata": rollout.group.metadata,
            }
            yield (b"," if place else b"") + write(whole)
    yield b"]}"
