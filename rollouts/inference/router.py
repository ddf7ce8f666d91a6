"""Share servers between workers: least tokens in flight, sticky, leased, fairly queued."""

import json
import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from rollouts.inference import router_scripts
from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.keeping import Keeper
from rollouts.inference.protocol import Server
from rollouts.inference.waiting import Inbox

logger = logging.getLogger(__name__)

# A waiter that does not come back for so long is taken for dead, and holds up nobody.
PATIENCE_SECONDS = 5.0
# Waiters look again by themselves, for leases that ended and servers that came back. All of one
# process together do so some 500 times a second at most, and each at least once in this time.
LOOK_AGAIN_SECONDS = 0.1
LOOK_AGAIN_SECONDS_EACH = 0.002
LONGEST_LOOK_AGAIN_SECONDS = 1.5
INBOX_BATCH = 100
# Hundreds of threads must not open a connection each: a client's pool refuses more than 100.
CALLS_AT_ONCE = 16
# Leases that are kept are renewed in time for two failures; so many with one step of the store.
KEPT_LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0
RENEWED_AT_ONCE = 200

BreakerState = Literal["closed", "half_open", "open"]
_BREAKER_STATES: tuple[BreakerState, ...] = ("closed", "half_open", "open")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Hold one slot of one server until it is released or its lease ends."""

    server: Server
    rollout_id: str
    token: str


@dataclass(frozen=True, slots=True)
class Breaker:
    """Say when a server is left alone: after `faults` in a row, each time twice as long."""

    faults: int = 2
    cool_off_seconds: float = 2.0
    longest_cool_off_seconds: float = 60.0


class Load(NamedTuple):
    """What is in flight on a server."""

    requests: int
    tokens: int


@dataclass(slots=True)
class Place:
    """Hold one request's place in the queue, from its first `acquire` until it has a slot.

    `tokens` are those it is expected to sample, `prompt_tokens` its prompt: what of that its
    rollout's server has seen already is not counted. Experiments that wait get tokens in flight
    in the ratio of their shares. Not thread-safe.
    """

    rollout_id: str
    tokens: int = 1
    prompt_tokens: int = 0
    experiment: str = ""
    share: float = 1.0
    token: str = field(default_factory=lambda: secrets.token_hex(12))
    pool: str | None = None
    asked: tuple[Server, ...] = ()
    look_again_at: float = 0.0


class Router:
    """Assign rollouts to servers through one Redis or Valkey that all workers share.

    Every method raises RouterUnavailable when the store does not answer. Thread-safe.
    All keys carry one hash tag, so a cluster keeps them on one node. A request whose prompt is
    where a slot is free goes before those of its experiment that came `overtake` places earlier.
    """

    def __init__(
        self,
        redis_client: "Redis",
        namespace: str,
        *,
        breaker: Breaker | None = None,
        overtake: int = router_scripts.OVERTAKE,
    ) -> None:
        self._redis: Any = redis_client
        self._prefix = f"{{{namespace}:inference}}"
        self._breaker = breaker or Breaker()
        self._process = secrets.token_hex(8)
        self._inbox = Inbox(self._receive)
        self._calls = threading.BoundedSemaphore(CALLS_AT_ONCE)
        self._keeper = Keeper("router-leases", self._renew_kept, period_seconds=RENEW_SECONDS)
        scripts = router_scripts
        self._acquire, self._release, self._leave = (
            self._redis.register_script(scripts.overtaking(script, overtake))
            for script in (scripts.ACQUIRE, scripts.RELEASE, scripts.LEAVE)
        )
        self._renew = self._redis.register_script(scripts.RENEW)
        self._fault = self._redis.register_script(scripts.FAULT)
        self._load = self._redis.register_script(scripts.LOAD)
        self._waiting = self._redis.register_script(scripts.WAITING)

    def acquire(
        self, servers: Sequence[Server], rollout_id: str, *, lease_seconds: float, tokens: int = 1
    ) -> Assignment | None:
        """Take a slot on the server this rollout used last, else on the least busy one.

        None when every candidate is full or left alone, or others wait for what is free. The
        slot frees itself after `lease_seconds` unless renewed.
        """
        place = Place(rollout_id, tokens)
        return self._ask(place, servers, lease_seconds, stay=False) if servers else None

    def wait(
        self,
        place: Place,
        servers: Sequence[Server],
        *,
        lease_seconds: float,
        wait_seconds: float,
    ) -> Assignment | None:
        """Take a slot as `acquire` does, waiting in the queue for at most `wait_seconds`.

        None leaves the place in the queue for a few seconds: call again, or `leave`.
        """
        deadline = time.monotonic() + wait_seconds
        self._inbox.join(place.token)
        while servers:
            if place.asked != tuple(servers) or time.monotonic() >= place.look_again_at:
                assignment = self._ask(place, servers, lease_seconds, stay=True)
                if assignment is not None:
                    self._inbox.leave(place.token)
                    return assignment
            pause = min(deadline, place.look_again_at) - time.monotonic()
            if self._inbox.wait(place.token, max(0.0, pause)):
                place.look_again_at = 0.0
            elif time.monotonic() >= deadline:
                break
        return None

    def leave(self, place: Place) -> None:
        """Leave the queue, and give back a slot that was given meanwhile. Idempotent."""
        self._inbox.leave(place.token)
        if place.pool is not None:
            self._run(self._leave, place.pool, place.token)

    def renew(self, assignments: Sequence[Assignment], *, lease_seconds: float) -> list[bool]:
        """Extend leases from now, in one step; False for each that had ended already."""
        names = [name for each in assignments for name in (each.server.id, each.token)]
        return [bool(each) for each in self._run(self._renew, _ms(lease_seconds), *names)]

    def keep(self, assignment: Assignment) -> None:
        """Renew the lease from now on, by `KEPT_LEASE_SECONDS`, until it is released."""
        self._keeper.hold(assignment)

    def release(self, assignment: Assignment, *, well: bool = False) -> None:
        """Free the slot, and give it to whose turn it is. Idempotent.

        Where the server did well its faults are forgotten.
        """
        self._keeper.drop(assignment)
        server = assignment.server
        self._run(self._release, server.pool, server.id, assignment.token, int(well))

    def report_fault(self, server_id: str) -> float:
        """Count a fault; return for how many seconds the server is now left alone."""
        breaker = self._breaker
        pause = self._run(
            self._fault,
            server_id,
            breaker.faults,
            _ms(breaker.cool_off_seconds),
            _ms(breaker.longest_cool_off_seconds),
        )
        return int(pause) / 1000

    def in_flight(self) -> dict[str, int]:
        """Return how many slots are taken on each server that was ever assigned."""
        return {server_id: load.requests for server_id, load in self.load().items()}

    def load(self) -> dict[str, Load]:
        """Return the requests and tokens in flight on each server that was ever assigned."""
        rows = sorted(self._run(self._load))
        return {_text(row[0]): Load(int(row[1]), int(row[2])) for row in rows}

    def breakers(self) -> dict[str, BreakerState]:
        """Return the breaker's state of each server that was ever assigned."""
        return {_text(row[0]): _BREAKER_STATES[row[3]] for row in sorted(self._run(self._load))}

    def waiting(self) -> dict[str, int]:
        """Return how many requests wait, per experiment that has any."""
        found: Counter[str] = Counter()
        for experiment, count in self._run(self._waiting):
            found[_text(experiment)] += int(count)
        return dict(found)

    def _ask(
        self, place: Place, servers: Sequence[Server], lease_seconds: float, *, stay: bool
    ) -> Assignment | None:
        """Join the queue or stay in it, and take what is there for this place."""
        pool = servers[0].pool
        place.pool, place.asked = pool, tuple(servers)
        waiter = {
            "token": place.token,
            "rollout": place.rollout_id,
            "tokens": max(0, place.tokens),
            "prompt": max(0, place.prompt_tokens),
            "experiment": place.experiment,
            "share": max(place.share, 1e-6),
            "inbox": self._process,
            "lease": _ms(lease_seconds),
            "servers": [[server.id, server.max_in_flight] for server in servers],
        }
        patience = _ms(PATIENCE_SECONDS) if stay else 0
        server_id = _text(self._run(self._acquire, pool, json.dumps(waiter), patience))
        pause = LOOK_AGAIN_SECONDS + LOOK_AGAIN_SECONDS_EACH * len(self._inbox)
        pause = min(pause, LONGEST_LOOK_AGAIN_SECONDS) * random.uniform(0.75, 1.25)  # noqa: S311
        place.look_again_at = time.monotonic() + pause
        if not server_id:
            return None
        server = next((each for each in servers if each.id == server_id), None)
        if server is None:  # given while the caller learnt that it must not go there
            self._run(self._release, pool, server_id, place.token, 0)
            return None
        return Assignment(server, place.rollout_id, place.token)

    def _renew_kept(self, assignments: list[Assignment]) -> None:
        try:
            for at in range(0, len(assignments), RENEWED_AT_ONCE):
                self.renew(assignments[at : at + RENEWED_AT_ONCE], lease_seconds=KEPT_LEASE_SECONDS)
        except RouterUnavailable as fault:
            logger.warning("leases of servers are not renewed: %s", fault)

    def _receive(self, seconds: float) -> list[str]:
        key = f"{self._prefix}:inbox:{self._process}"
        first = self._call(self._redis.blpop, [key], timeout=max(0.01, min(seconds, 1.0)))
        if first is None:
            return []
        more = self._call(self._redis.lpop, key, INBOX_BATCH) or []
        return [_text(token) for token in (first[1], *more)]

    def _run(self, script: Callable[..., Any], *arguments: str | int) -> Any:
        with self._calls:
            return self._call(script, keys=[self._prefix], args=arguments)

    @staticmethod
    def _call(command: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return command(*arguments, **named)
        except RedisError as error:
            raise RouterUnavailable(f"the routing store does not answer: {error}") from error


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
