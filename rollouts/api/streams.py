"""Trajectories of a batch, sent one by one so that memory stays bounded."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import StreamingHttpResponse
from django.utils.http import http_date
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request

from rollouts.api.connections import let_go_of_connection
from rollouts.api.serializers.batches import BatchOutput
from rollouts.exceptions import NotThere
from rollouts.models import Batch, Rollout
from rollouts.services.trajectories import empty_trajectory, read_trajectory

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 32


class NdjsonRenderer(JSONRenderer):
    """One trajectory a line."""

    media_type = "application/x-ndjson"
    format = "ndjson"


def batch_response(request: Request, batch: Batch) -> StreamingHttpResponse:
    """Return a batch with its trajectories, in the format that the caller accepts."""
    renderer = getattr(request, "accepted_renderer", None)
    ndjson = isinstance(renderer, NdjsonRenderer)
    parts = as_lines(batch) if ndjson else as_json(batch)
    asynchronous = isinstance(request._request, ASGIRequest)
    response = StreamingHttpResponse(
        asynchronously(parts) if asynchronous else parts,
        content_type=NdjsonRenderer.media_type if ndjson else "application/json",
    )
    response["Batch-Id"] = str(batch.pk)
    response["Batch-Groups"] = str(batch.group_count)
    response["Batch-Lease-Expires"] = http_date(batch.lease_expires_at.timestamp())
    response["Cache-Control"] = "no-store"
    return response


def as_json(batch: Batch) -> Iterator[bytes]:
    """Yield one JSON object: the batch, its trajectories last."""
    head = JSONRenderer().render(BatchOutput(batch).data)
    yield head[:-1] + b',"trajectories":['
    for place, trajectory in enumerate(trajectories(batch_id=batch.pk)):
        yield (b"," if place else b"") + _encode(trajectory)
    yield b"]}"


def as_lines(batch: Batch) -> Iterator[bytes]:
    """Yield each trajectory as a line."""
    for trajectory in trajectories(batch_id=batch.pk):
        yield _encode(trajectory) + b"\n"


def trajectories(*, batch_id: UUID) -> Iterator[dict[str, Any]]:
    """Yield each trajectory of a batch in group and sample order; no connection is held between.

    The rollouts are fixed when the first is asked for. One whose stored tokens cannot be read comes
    without tokens, not trainable, and with an `error` that says why: it must not hold up the rest.
    """
    rows = Rollout.objects.filter(group__batch_id=batch_id).order_by("sequence", "sample")
    ids = list(rows.values_list("pk", flat=True))
    for start in range(0, len(ids), ROWS_AT_ONCE):
        wanted = ids[start : start + ROWS_AT_ONCE]
        page = Rollout.objects.select_related("group__task", "environment", "trajectory")
        found = page.in_bulk(wanted)
        let_go_of_connection()
        for rollout_id in wanted:
            if rollout_id in found:
                yield _trajectory(found[rollout_id])


def _trajectory(rollout: Rollout) -> dict[str, Any]:
    if not hasattr(rollout, "trajectory"):
        return empty_trajectory(rollout)
    try:
        return read_trajectory(rollout=rollout)
    except NotThere as problem:
        logger.error("%s: %s", problem.code, problem)
        error = {"code": problem.code, "detail": str(problem)}
        return {**empty_trajectory(rollout), "error": error}


def _encode(trajectory: dict[str, Any]) -> bytes:
    return json.dumps(trajectory, separators=(",", ":"), ensure_ascii=False).encode()


async def asynchronously(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a blocking iterator, each made in the request's thread."""
    step = sync_to_async(lambda: next(parts, None))
    while (part := await step()) is not None:
        yield part
