"""Server-sent events of an experiment; a listener holds no thread and no database connection."""

import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any
from uuid import UUID

from asgiref.sync import SyncToAsync, sync_to_async
from django.conf import settings
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from rollouts.api.connections import let_go_of_connection
from rollouts.api.negotiation import WeightedNegotiation
from rollouts.api.scoping import visible_experiment
from rollouts.exceptions import RolloutError
from rollouts.services.event_streams import Follower, Seen
from rollouts.services.events import EventKind

MEDIA_TYPE = "text/event-stream"
PING = b": ping\n\n"
# Sent when nothing that happens from then on is missed.
BEGINNING = b"retry: 2000\n: events follow\n\n"
# A token that was revoked, or an experiment that is no longer the caller's, ends the stream then.
CHECK_SECONDS = 30.0

View = Callable[..., HttpResponseBase]


class TooManyListeners(RolloutError):
    """This web process serves as many listeners as it may."""

    code = "events.too_many"
    status = 503


class Listening(Response):
    """The caller may listen: to what, and from where."""

    def __init__(self, *, experiment_id: UUID, last_id: str | None, kinds: frozenset[str]) -> None:
        super().__init__(status=200)
        self.experiment_id = experiment_id
        self.last_id = last_id
        self.kinds = kinds


class EventStreamRenderer(JSONRenderer):
    """The media type of server-sent events."""

    media_type = MEDIA_TYPE
    format = "event-stream"


class ExperimentEventsView(APIView):
    """Who may listen to what; `listened` does the listening."""

    renderer_classes = [EventStreamRenderer]
    content_negotiation_class: Any = WeightedNegotiation

    @extend_schema(
        operation_id="experiments_events",
        parameters=[
            OpenApiParameter(
                "Last-Event-ID",
                OpenApiTypes.STR,
                OpenApiParameter.HEADER,
                description="The id of the last event seen: what followed comes first.",
            ),
            OpenApiParameter(
                "kinds", OpenApiTypes.STR, description="Such as `group.ready,batch.expired`."
            ),
        ],
        responses={
            (200, MEDIA_TYPE): OpenApiResponse(
                {"type": "string"}, description="Events, until the caller leaves."
            )
        },
    )
    def get(self, request: Request, experiment_id: UUID) -> Response:
        """Tell what happens to an experiment, as server-sent events."""
        experiment = visible_experiment(request, experiment_id)
        if not getattr(request._request, "listens", False):
            check_room()
        return Listening(
            experiment_id=experiment.pk,
            last_id=request.headers.get("Last-Event-ID") or None,
            kinds=_kinds(request.query_params.get("kinds", "")),
        )


def _kinds(text: str) -> frozenset[str]:
    """Return the kinds that are asked for; none: all. Raises ValidationError."""
    wanted = frozenset(filter(None, (word.strip() for word in text.split(","))))
    unknown = sorted(wanted - set(EventKind))
    if unknown:
        known = ", ".join(EventKind)
        raise ValidationError({"kinds": [f"Unknown kind {unknown[0]!r}; known: {known}."]})
    return wanted | {EventKind.RESYNC} if wanted else wanted


class Listeners:
    """How many listen now, in this process."""

    count = 0


def check_room() -> None:
    """Refuse one listener more than a process may have. Raises TooManyListeners."""
    if Listeners.count >= settings.EVENTS_LISTENERS:
        raise TooManyListeners(
            "Too many listen already; ask again later, or use a webhook.", retry_after=30.0
        )


def listened(view: View) -> Callable[..., Coroutine[Any, Any, HttpResponseBase]]:
    """Wrap a view that tells who may listen: answer with the events themselves."""

    @csrf_exempt
    @functools.wraps(view)
    async def listening(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        check = functools.partial(_checked, view, request, *args, **kwargs)
        answer = await sync_to_async(check, thread_sensitive=False)()
        if not isinstance(answer, Listening):
            return answer
        _let_go_of_thread()
        request.listens = True  # type: ignore[attr-defined]
        response = StreamingHttpResponse(_lines(answer, check), content_type=MEDIA_TYPE)
        response["Cache-Control"] = "no-store"
        response["X-Accel-Buffering"] = "no"  # a proxy in front would keep events back
        return response

    return listening


def _checked(view: View, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
    """Ask the view, as at first, and give the database connection back."""
    try:
        response = view(request, *args, **kwargs)
        if not isinstance(response, Listening) and isinstance(response, Response):
            response.render()
        return response
    finally:
        let_go_of_connection()


def _let_go_of_thread() -> None:
    """End the thread that middleware got for this request: it would idle as long as it lasts.

    Django keeps one for each request from its first synchronous step to its end, which for a
    listener may be days. A later step would get a new one.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        executor = SyncToAsync.context_to_thread_executor.pop(context, None)
        if executor is not None:
            executor.shutdown(wait=False)


async def _lines(wanted: Listening, check: Callable[[], HttpResponseBase]) -> AsyncIterator[bytes]:
    """Yield the events as lines, until the caller leaves or may no longer listen."""
    follower = Follower(wanted.experiment_id, wanted.last_id)
    Listeners.count += 1
    try:
        beginning = BEGINNING
        checked_at = time.monotonic()
        async with aclosing(follower.events()) as events:  # type: ignore[type-var]
            async for found in events:
                shown = [each for each in found if not wanted.kinds or each.kind in wanted.kinds]
                yield beginning + b"".join(map(_line, shown)) or PING
                beginning = b""
                if time.monotonic() - checked_at > CHECK_SECONDS:
                    again = await sync_to_async(check, thread_sensitive=False)()
                    if not isinstance(again, Listening):
                        return
                    checked_at = time.monotonic()
    finally:
        Listeners.count -= 1
        await follower.close()


def _line(event: Seen) -> bytes:
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.data}\n\n".encode()
