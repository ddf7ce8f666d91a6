"""Idempotency-Key for creating calls."""

import functools
import json
from collections.abc import Callable
from typing import Any

from django.db import transaction
from django.http.response import HttpResponseBase
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.exceptions import InvalidValue
from rollouts.services.idempotency import (
    MAX_KEY_LENGTH,
    ClaimedCall,
    RememberedAnswer,
    abandon_call,
    begin_call,
    remember_answer,
)

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

Create = Callable[..., HttpResponseBase]


def body_of(response: Any) -> Any:
    """Return the answer's body as JSON would give it back: UUIDs and times become text."""
    return json.loads(JSONRenderer().render(response.data) or b"null")


def same_body(view: Any, request: Request, answer: RememberedAnswer) -> HttpResponseBase:
    """Return the first answer again."""
    del view, request
    return Response(answer.body, status=answer.status)


def idempotent(
    *,
    remember: Callable[[Any], Any] = body_of,
    replay: Callable[[Any, Request, RememberedAnswer], HttpResponseBase] = same_body,
) -> Callable[[Create], Create]:
    """Make a view's creating method answer a repeated call with what the first one answered.

    The work and its answer are one transaction. `remember` turns a response into what is stored,
    `replay` turns that into a response. A 204 made nothing and is not remembered. The method
    raises IdempotencyConflict and IdempotencyRunning.
    """

    def decorate(create: Create) -> Create:
        @functools.wraps(create)
        def once(view: Any, request: Request, **kwargs: Any) -> HttpResponseBase:
            key = request.headers.get(HEADER)
            if key is None:
                return create(view, request, **kwargs)
            call = _begin(request, key)
            if isinstance(call, RememberedAnswer):
                response = replay(view, request, call)
                response[REPLAYED] = "true"
                return response
            try:
                with transaction.atomic():
                    response = create(view, request, **kwargs)
                    if response.status_code != 204:
                        remember_answer(
                            call=call, status=response.status_code, body=remember(response)
                        )
            except BaseException:
                abandon_call(call=call)
                raise
            if response.status_code == 204:
                abandon_call(call=call)
            return response

        once.takes_idempotency_key = True  # type: ignore[attr-defined]
        return once

    return decorate


def _begin(request: Request, key: str) -> ClaimedCall | RememberedAnswer:
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidValue(f"Idempotency-Key must have 1 to {MAX_KEY_LENGTH} printable characters.")
    return begin_call(owner=request.user, key=key, route=request.path, body=request.data)
