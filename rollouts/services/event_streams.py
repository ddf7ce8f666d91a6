"""Reading an experiment's events: follow its stream, resume where somebody stopped.

Ids are those of the stream in the broker's store. Whoever comes back with the id of the last event
that it saw gets all that followed, or a `resync` when some of that is no longer kept.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from rollouts.services.events import EventKind, event_store, make_event, stream_key

logger = logging.getLogger(__name__)

AT_ONCE = 200
# What comes meanwhile is read together: many who listen to a busy experiment cost little then.
PAUSE_SECONDS = 0.1
RECONNECT_SECONDS = 1.0
BEGINNING = "0-0"
_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


@dataclass(frozen=True, slots=True)
class Seen:
    """An event as it lies in a stream."""

    id: str
    kind: str
    data: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What a stream keeps: the ids of its first and last events, and whether it lost some."""

    first: str | None
    last: str
    trimmed: bool


def ordered(event_id: str) -> tuple[int, int]:
    """Return an id as numbers that compare."""
    time, _, number = event_id.partition("-")
    return int(time), int(number or 0)


def is_id(text: str) -> bool:
    """Tell whether a text is an id of a stream."""
    return _ID.fullmatch(text) is not None


def is_lost(kept: Kept | None, position: str) -> bool:
    """Tell whether events after a position are no longer there, or the position is another's."""
    place = ordered(position)
    if kept is None:
        return place > (0, 0)
    if place > ordered(kept.last):
        return True
    if place == (0, 0):
        return kept.trimmed
    return place < ordered(kept.first if kept.first is not None else kept.last)


def as_kept(info: Any) -> Kept:
    """Return what `XINFO STREAM` says."""
    first = info["first-entry"]
    return Kept(
        first=None if first is None else first[0],
        last=info["last-generated-id"],
        trimmed=int(info["entries-added"]) > int(info["length"]),
    )


def resync(experiment_id: UUID, position: str) -> Seen:
    """Return the event that says: what was between is lost, read the state anew from here on."""
    event = make_event(experiment_id, EventKind.RESYNC)
    return Seen(position, event.kind, event.data)


def as_seen(entries: Any) -> list[Seen]:
    """Return the events of a stream's entries."""
    return [Seen(entry_id, fields["kind"], fields["data"]) for entry_id, fields in entries]


def end_of(experiment_id: UUID) -> str:
    """Return the id of the last event of a stream, from where all that comes is new.

    Never waits. Raises RedisError.
    """
    kept = _kept(experiment_id)
    return kept.last if kept is not None else BEGINNING


def read_after(experiment_id: UUID, position: str, *, limit: int) -> list[Seen]:
    """Return the next events after a position; one `resync` when some of them are lost.

    Never waits. Raises RedisError.
    """
    kept = _kept(experiment_id)
    if is_lost(kept, position):
        return [resync(experiment_id, kept.last if kept is not None else BEGINNING)]
    if kept is None:
        return []
    key = stream_key(experiment_id)
    return as_seen(event_store().xrange(key, min=f"({position}", count=limit))


def _kept(experiment_id: UUID) -> Kept | None:
    try:
        return as_kept(event_store().xinfo_stream(stream_key(experiment_id)))
    except ResponseError:
        return None


class Follower:
    """Follow one experiment's stream over a connection of its own, until it is closed."""

    # Those of this process that cannot read: the first is told of, not each of hundreds.
    failing: ClassVar[set["Follower"]] = set()

    def __init__(self, experiment_id: UUID, last_id: str | None) -> None:
        self._experiment_id = experiment_id
        self._key = stream_key(experiment_id)
        self._position = last_id
        self._ping_seconds = settings.EVENTS_PING_SECONDS
        self._store: Any = redis.asyncio.Redis.from_url(
            settings.BROKER_URL,
            decode_responses=True,
            single_connection_client=True,
            socket_connect_timeout=5,  # hundreds may connect at once
            socket_timeout=self._ping_seconds + 5,
            retry=Retry(NoBackoff(), retries=0),
        )

    async def events(self) -> AsyncIterator[list[Seen]]:
        """Yield what happens, in order; an empty list each time that nothing did for a while.

        With the first, empty or not, the place is found from where on nothing is missed. A store
        that does not answer ends nothing: what it lost is told when it is back.
        """
        checked = False
        while True:
            try:
                if not checked:
                    yield await self._begin()
                    checked = True
                    Follower.failing.discard(self)
                found = await self._read()
            except (RedisError, OSError) as fault:
                if not Follower.failing:
                    logger.warning("events cannot be read (%s): trying again", fault)
                Follower.failing.add(self)
                checked = False
                await self._store.connection_pool.disconnect()
                await asyncio.sleep(RECONNECT_SECONDS)
                found = []
            yield found
            if found:
                await asyncio.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        Follower.failing.discard(self)
        await self._store.aclose()

    async def _begin(self) -> list[Seen]:
        """Find where to go on; return a `resync` when that is not where it was."""
        try:
            kept = as_kept(await self._store.xinfo_stream(self._key))
        except ResponseError:
            kept = None
        end = kept.last if kept else BEGINNING
        if self._position is None:
            self._position = end
        elif not is_id(self._position) or is_lost(kept, self._position):
            self._position = end
            return [resync(self._experiment_id, end)]
        return []

    async def _read(self) -> list[Seen]:
        """Return what came after the position, waiting for it as long as between two pings."""
        assert self._position is not None
        answer = await self._store.xread(
            {self._key: self._position}, count=AT_ONCE, block=max(1, int(self._ping_seconds * 1000))
        )
        found = as_seen(_entries(answer))
        if not found:
            return []
        first = await self._store.xrange(self._key, count=1)
        if self._position != BEGINNING and first and _is_after(first[0][0], self._position):
            # The stream was cut while this was too slow for it: some may be missing.
            self._position = found[-1].id
            return [resync(self._experiment_id, self._position)]
        self._position = found[-1].id
        return found


def _is_after(one: str, other: str) -> bool:
    return ordered(one) > ordered(other)


def _entries(answer: Any) -> Any:
    """Return the entries of the only stream in an answer of XREAD, whichever protocol it speaks."""
    if not answer:
        return []
    if isinstance(answer, dict):
        (entries,) = answer.values()
        return entries[0] if len(entries) == 1 and isinstance(entries[0], list) else entries
    return answer[0][1]
