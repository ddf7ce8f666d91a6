"""Long-poll for batches: no database connection is held while waiting."""

import functools
from asyncio import sleep
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework.response import Response

from rollouts.api.connections import let_go_of_connection
from rollouts.services.batch_choice import Wish, worth_trying

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0

View = Callable[..., HttpResponseBase]


class NotEnoughYet(Response):
    """204: fewer finished groups than asked for; says what to wait for."""

    def __init__(self, *, experiment_id: UUID, wish: Wish, wait_seconds: float) -> None:
        super().__init__(status=204)
        self.experiment_id = experiment_id
        self.wish = wish
        self.wait_seconds = wait_seconds


def long_polled(view: View) -> Callable[..., Coroutine[Any, Any, HttpResponseBase]]:
    """Wrap a view that tries once: repeat it when there is something, until the wait ends.

    Every try authenticates and checks again, so a token revoked meanwhile gets nothing.
    """

    @csrf_exempt
    @functools.wraps(view)
    async def waiting(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        started = monotonic()
        response: HttpResponseBase = await _in_thread(_once, view, request, *args, **kwargs)
        if not isinstance(response, NotEnoughYet):
            return response
        wait = min(response.wait_seconds, settings.BATCH_WAIT_LIMIT_SECONDS)
        pause = FIRST_PAUSE_SECONDS
        while (left := started + wait - monotonic()) > 0:
            await sleep(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
            asked = {"experiment_id": response.experiment_id, "wish": response.wish}
            if not await _in_thread(worth_trying, **asked):
                continue
            response = await _in_thread(_once, view, request, *args, **kwargs)
            if not isinstance(response, NotEnoughYet):
                break
        return response

    return waiting


async def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await sync_to_async(_and_let_go)(function, *args, **kwargs)


def _and_let_go(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call and give the database connection back to the pool."""
    try:
        return function(*args, **kwargs)
    finally:
        let_go_of_connection()


def _once(view: View, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
    response = view(request, *args, **kwargs)
    if isinstance(response, Response) and not response.is_rendered:
        response.render()
    return response
