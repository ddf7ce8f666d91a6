"""Waiting for many jobs at once: one query a round, and no connection between rounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from uuid import UUID
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django.db import Error

from rollouts.api.connections import let_go_of_connection
from rollouts.models import Rollout
from rollouts.states import RolloutState

ROUND_SECONDS = 0.2
AT_ONCE = 5000

logger = logging.getLogger(__name__)


class DoneWatch:
    """Tell of rollouts that are done; for the callers of one event loop.

    Hundreds of calls wait at the same time, each for its own rollout: they share the query. A
    round that the database refuses is left out; the callers' own limits bound the wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[UUID, set[asyncio.Future[None]]] = {}
        self._rounds: asyncio.Task[None] | None = None

    async def done(self, rollout_id: UUID, *, seconds: float) -> bool:
        """Wait until a rollout is done; False when it is not so in time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout_id, set()).add(future)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._look_until_empty())
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            return False
        finally:
            others = self._waiting.get(rollout_id, set())
            others.discard(future)
            if not others:
                self._waiting.pop(rollout_id, None)
        return True

    async def _look_until_empty(self) -> None:
        while self._waiting:
            await self._look()
            await asyncio.sleep(ROUND_SECONDS)

    async def _look(self) -> None:
        try:
            found = await sync_to_async(_done_of, thread_sensitive=False)(list(self._waiting))
        except Error as error:
            logger.warning("jobs cannot be looked after now: %s", error)
            return
        for rollout_id in found:
            for future in self._waiting.get(rollout_id, ()):
                with suppress(asyncio.InvalidStateError):  # given up in this moment
                    future.set_result(None)


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, DoneWatch] = WeakKeyDictionary()


def done_watch() -> DoneWatch:
    """Return the watch of the running event loop."""
    return _watches.setdefault(asyncio.get_running_loop(), DoneWatch())


def _done_of(ids: Collection[UUID]) -> list[UUID]:
    """Return which rollouts are done, or gone; the connection goes back to the pool."""
    try:
        wanted = list(ids)
        open_ids: set[UUID] = set()
        for start in range(0, len(wanted), AT_ONCE):
            part = wanted[start : start + AT_ONCE]
            rows = Rollout.objects.filter(pk__in=part).exclude(state=RolloutState.DONE)
            open_ids.update(rows.values_list("pk", flat=True))
        return [each for each in wanted if each not in open_ids]
    finally:
        let_go_of_connection()
