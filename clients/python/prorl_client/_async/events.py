"""Follow an experiment's events over connections that break."""

from __future__ import annotations

import logging
from asyncio import sleep
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

import httpx

from prorl_client.calls import call
from prorl_client.errors import ProblemError, ServiceUnreachable
from prorl_client.sse import Event, EventParser

if TYPE_CHECKING:
    from prorl_client._async.client import AsyncClient

logger = logging.getLogger("prorl_client")

MEDIA_TYPE = "text/event-stream"
QUICK_SECONDS = 1.0  # a stream that ends sooner is not opened again at once


async def follow(
    client: AsyncClient, path: str, last_id: str, kinds: Iterable[str] = ()
) -> AsyncIterator[Event]:
    """Yield events, resuming after the last one whenever the stream breaks.

    Raises ProblemError for a refusal, ServiceUnreachable when the service stays away for as long
    as the client insists.
    """
    parser, wanted = EventParser(last_id), ",".join(kinds) or None
    tries, reached = 0, monotonic()
    while True:
        fault: Exception
        opened = monotonic()
        try:
            async for event in _stream(client, path, parser, wanted):
                tries, reached = 0, monotonic()
                yield event
            fault = ServiceUnreachable("the stream ended")
            tries = 0 if monotonic() - opened > QUICK_SECONDS else tries
        except (ProblemError, httpx.TransportError) as problem:
            fault = problem
            reached = max(reached, opened) if monotonic() - opened > QUICK_SECONDS else reached
        tries += 1
        pause = client.retries.pause(tries, fault)
        late = monotonic() + (pause or 0.0) - reached > client.retries.total_seconds
        if pause is None or late:
            if isinstance(fault, ProblemError):
                raise fault
            raise ServiceUnreachable(f"GET {path}: the events stay away: {fault}") from fault
        logger.info("GET %s: %s; again in %.1f s", path, fault, pause)
        await sleep(pause)
        parser = EventParser(parser.last_id)


async def _stream(
    client: AsyncClient, path: str, parser: EventParser, kinds: str | None
) -> AsyncIterator[Event]:
    headers = {"Accept": MEDIA_TYPE, "Cache-Control": "no-store"}
    if parser.last_id:
        headers["Last-Event-ID"] = parser.last_id
    plain = call("GET", path, params={"kinds": kinds})
    response = await client.stream(replace(plain, headers=headers))
    try:
        async for chunk in response.aiter_bytes():
            for event in parser.feed(chunk):
                yield event
    finally:
        await response.aclose()
