"""Events: what happens to an experiment, written to a stream of the broker's store on commit.

An event is a hint for who watches; the rows are the truth. Nobody waits for the store: events are
handed, once their transaction has committed, to a thread of the process that writes all that wait
with one pipeline. What the store does not take is lost, and a `resync` in the stream says so.
"""

import atexit
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any
from uuid import UUID

import redis
from django.conf import settings
from django.db import transaction
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from rollouts.models import Experiment, Rollout
from rollouts.states import ExperimentState

logger = logging.getLogger(__name__)

WAITING_LIMIT = 20_000
AT_ONCE = 500
RETRY_SECONDS = 1.0
FLUSH_SECONDS = 2.0
EACH_LIMIT = 1_000
KEPT_SECONDS = 14 * 86_400  # a stream goes away so long after its last event


class EventKind(StrEnum):
    """What can be watched."""

    ROLLOUT_DONE = "rollout.done"
    GROUP_READY = "group.ready"
    GROUP_FILTERED = "group.filtered"
    GROUP_CANCELLED = "group.cancelled"
    BATCH_LEASED = "batch.leased"
    BATCH_ACKNOWLEDGED = "batch.acknowledged"
    BATCH_RETURNED = "batch.returned"
    BATCH_EXPIRED = "batch.expired"
    BATCH_REWOUND = "batch.rewound"
    POLICY_VERSION = "policy.version"
    EXPERIMENT_STATE = "experiment.state"
    COUNTS = "counts"
    RESYNC = "resync"


@dataclass(frozen=True, slots=True)
class Event:
    """One event on its way to its experiment's stream; `data` is its JSON."""

    experiment_id: UUID
    kind: str
    data: str


def emit(experiment_id: UUID, kind: str, **values: Any) -> None:
    """Write an event once the transaction has committed; never fails and never waits.

    `values` are ids and small numbers or words. Raises ValueError for a kind that is none.
    """
    event = make_event(experiment_id, EventKind(kind), **values)
    transaction.on_commit(partial(_put, event), robust=True)


def emit_policy_version(policy_id: UUID, version: int) -> None:
    """Tell each experiment of a policy that is not stopped which version it has now."""
    experiments = Experiment.objects.filter(policy_id=policy_id)
    unstopped = experiments.exclude(state=ExperimentState.STOPPED).order_by()
    for experiment_id in unstopped.values_list("pk", flat=True):
        emit(experiment_id, EventKind.POLICY_VERSION, policy=policy_id, version=version)


def emit_rollouts_done(ids: Sequence[UUID]) -> None:
    """Tell that rollouts of one experiment are done, with one query."""
    names = ("rollout", "group", "sample", "outcome", "reward", "stop_reason", "failure_code")
    rows = Rollout.objects.filter(pk__in=ids[: EACH_LIMIT + 1]).order_by("sequence", "sample")
    found = list(rows.values_list("experiment_id", "pk", "group_id", *names[2:]))
    if found:
        told = [dict(zip(names, values, strict=True)) for _, *values in found]
        emit_each(found[0][0], EventKind.ROLLOUT_DONE, told)


def emit_each(experiment_id: UUID, kind: str, values: Sequence[dict[str, Any]]) -> None:
    """Emit an event for each of some values, or one `resync` when they are very many."""
    if len(values) > EACH_LIMIT:
        emit(experiment_id, EventKind.RESYNC)
        return
    for each in values:
        emit(experiment_id, kind, **each)


def make_event(experiment_id: UUID, kind: str, **values: Any) -> Event:
    """Return an event of now."""
    content = {
        "kind": str(kind),
        "at": timezone.now().isoformat(),
        "experiment": experiment_id,
        **values,
    }
    return Event(experiment_id, str(kind), json.dumps(content, separators=(",", ":"), default=str))


def stream_key(experiment_id: UUID | str) -> str:
    """Return the name of an experiment's stream in the broker's store."""
    return f"prorl:{settings.DEPLOYMENT}:events:{experiment_id}"


@lru_cache(maxsize=1)
def event_store() -> Any:
    """Return the client of the broker's store, shared by all threads of this process."""
    return redis.Redis.from_url(
        settings.BROKER_URL,
        decode_responses=True,
        socket_connect_timeout=2,
        socket_timeout=2,
        retry=Retry(NoBackoff(), retries=1),
    )


class EventWriter:
    """Write events from a thread of its own, in order; keep at most `limit` waiting."""

    def __init__(self, store: Any, *, limit: int = WAITING_LIMIT) -> None:
        self._store = store
        self._limit = limit
        self._waiting: deque[Event] = deque()
        self._lost: set[UUID] = set()
        self._changed = threading.Condition()
        self._writing = False
        self._failing = False
        self._thread = threading.Thread(target=self._loop, name="events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Take an event, without waiting; when too many wait, its stream gets a `resync`."""
        with self._changed:
            if len(self._waiting) < self._limit:
                self._waiting.append(event)
            else:
                self._lost.add(event.experiment_id)
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until nothing waits any more; False when the time ended before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._writing and not self._lost,
                timeout_seconds,
            )

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting or self._lost))
                if self._failing:
                    # What waits meanwhile is written with the first that the store takes again.
                    self._changed.wait_for(lambda: False, RETRY_SECONDS)
                lost, self._lost = self._lost, set()
                events = [make_event(each, EventKind.RESYNC) for each in sorted(lost)]
                while self._waiting and len(events) < AT_ONCE:
                    events.append(self._waiting.popleft())
                self._writing = True
            refused = set(lost)
            try:
                refused = self._write(events)
            except Exception as error:
                # Without this thread the process would tell nothing any more.
                refused = {each.experiment_id for each in events}
                self._note_failure(error)
            else:
                self._failing = bool(refused)
            finally:
                with self._changed:
                    self._lost |= refused
                    self._writing = False
                    self._changed.notify_all()

    def _write(self, events: list[Event]) -> set[UUID]:
        """Write events with one pipeline; return the experiments whose streams refused some."""
        pipeline = self._store.pipeline(transaction=False)
        for event in events:
            pipeline.xadd(
                stream_key(event.experiment_id),
                {"kind": event.kind, "data": event.data},
                maxlen=settings.EVENTS_KEPT,
                approximate=True,
            )
        touched = sorted({event.experiment_id for event in events})
        for experiment_id in touched:
            pipeline.expire(stream_key(experiment_id), KEPT_SECONDS)
        answers = pipeline.execute(raise_on_error=False)
        refused = {
            event.experiment_id
            for event, answer in zip(events, answers, strict=False)
            if isinstance(answer, RedisError)
        }
        if refused and not self._failing:
            fault = next(each for each in answers if isinstance(each, RedisError))
            logger.warning("the store refused events of %d experiments: %s", len(refused), fault)
        return refused

    def _note_failure(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "events are lost until the store answers (%s: %s)", type(error).__name__, error
            )
        self._failing = True


_writer: EventWriter | None = None
_lock = threading.Lock()


def writer() -> EventWriter:
    """Return the writer of this process; a forked process makes one of its own."""
    global _writer
    with _lock:
        if _writer is None:
            _writer = EventWriter(event_store())
        return _writer


def flush_events(timeout_seconds: float = FLUSH_SECONDS) -> bool:
    """Wait until what was emitted is written or lost; False when the time ended before."""
    return _writer is None or _writer.flush(timeout_seconds)


def _put(event: Event) -> None:
    writer().put(event)


def _forget() -> None:
    """Leave the parent's writer and its connections behind: threads do not survive a fork."""
    global _writer, _lock
    _writer, _lock = None, threading.Lock()
    event_store.cache_clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(flush_events)
