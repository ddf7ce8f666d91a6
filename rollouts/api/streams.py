"""A batch's trajectories as HTTP: JSON, one a line, or Arrow, sent bit by bit."""

import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import StreamingHttpResponse
from django.utils.cache import patch_vary_headers
from django.utils.http import http_date
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request

from rollouts.api.negotiation import WeightedNegotiation, wants_gzip
from rollouts.api.serializers.batches import BatchOutput
from rollouts.models import Batch
from rollouts.querysets import RolloutQuerySet
from rollouts.services import arrow
from rollouts.services.payloads import (
    arrow_stream,
    between,
    in_chunks,
    json_trajectories,
    rollouts_of_batch,
)

GZIP_LEVEL = 1


class NdjsonRenderer(JSONRenderer):
    """One trajectory a line."""

    media_type = "application/x-ndjson"
    format = "ndjson"


class ArrowRenderer(JSONRenderer):
    """One segment a row."""

    media_type = arrow.MEDIA_TYPE
    format = "arrow"


class TrajectoryFormatsMixin:
    """Offer one a line and Arrow, where an action answers with trajectories; JSON everywhere."""

    trajectory_actions: frozenset[str] = frozenset()
    content_negotiation_class: Any = WeightedNegotiation

    def get_renderers(self) -> list[Any]:
        """Return what the action can answer in, the default first."""
        if getattr(self, "action", None) in self.trajectory_actions:
            return [JSONRenderer(), NdjsonRenderer(), ArrowRenderer()]
        return [JSONRenderer()]


def batch_response(request: Request, batch: Batch) -> StreamingHttpResponse:
    """Return a batch with its trajectories, in the format that the caller prefers."""
    response = trajectories_response(
        request,
        rollouts_of_batch(batch.pk),
        described=lambda: JSONRenderer().render(BatchOutput(batch).data),
    )
    response["Batch-Id"] = str(batch.pk)
    response["Batch-Groups"] = str(batch.group_count)
    response["Batch-Lease-Expires"] = http_date(batch.lease_expires_at.timestamp())
    return response


def trajectories_response(
    request: Request,
    rollouts: RolloutQuerySet,
    *,
    described: Callable[[], bytes] = lambda: b"{}",
) -> StreamingHttpResponse:
    """Return the trajectories of rollouts, in their order and in the format the caller prefers.

    `described` gives the JSON of the object that they belong to: they become its last member.
    """
    renderer = getattr(request, "accepted_renderer", None)
    media_type = "application/json"
    if isinstance(renderer, ArrowRenderer | NdjsonRenderer):
        media_type = renderer.media_type
    if media_type == arrow.MEDIA_TYPE:
        parts = arrow_stream(rollouts, batch=described())
    elif media_type == NdjsonRenderer.media_type:
        parts = (part + b"\n" for part in json_trajectories(rollouts))
    else:
        parts = as_json(described(), rollouts)
    response = _streamed(request, in_chunks(parts))
    response["Content-Type"] = media_type
    response["Cache-Control"] = "no-store"
    patch_vary_headers(response, ["Accept", "Accept-Encoding"])
    return response


def as_json(described: bytes, rollouts: RolloutQuerySet) -> Iterator[bytes]:
    """Yield one JSON object, its trajectories last."""
    comma = b"," if described != b"{}" else b""
    head = described[:-1] + comma + b'"trajectories":['
    return between(head, json_trajectories(rollouts), b"]}")


def _streamed(request: Request, parts: Iterator[bytes]) -> StreamingHttpResponse:
    compress = wants_gzip(request.headers.get("Accept-Encoding", ""))
    if compress:
        parts = compressed(parts)
    asynchronous = isinstance(request._request, ASGIRequest)
    response = StreamingHttpResponse(asynchronously(parts) if asynchronous else parts)
    if compress:
        response["Content-Encoding"] = "gzip"
    return response


def compressed(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the parts as one gzip stream."""
    packer = zlib.compressobj(GZIP_LEVEL, wbits=31)
    for part in parts:
        if packed := packer.compress(part):
            yield packed
    yield packer.flush()


async def asynchronously(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a blocking iterator, each made in the request's thread."""
    step = sync_to_async(_next)
    while (part := await step(parts)) is not None:
        yield part


def _next(parts: Iterator[bytes]) -> bytes | None:
    return next(parts, None)
