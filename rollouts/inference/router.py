"""Share inference servers between workers: least in flight, sticky, leased, with a breaker."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from rollouts.inference import router_scripts
from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.protocol import Server

STICKY_SECONDS = 3600.0


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


class Router:
    """Assign rollouts to servers through one Redis or Valkey that all workers share.

    Every method raises RouterUnavailable when the store does not answer. Thread-safe.
    All keys carry one hash tag, so a cluster keeps them on one node.
    """

    def __init__(
        self, redis_client: "Redis", namespace: str, *, breaker: Breaker | None = None
    ) -> None:
        self._redis: Any = redis_client
        self._prefix = f"{{{namespace}:inference}}"
        self._breaker = breaker or Breaker()
        self._acquire = self._redis.register_script(router_scripts.ACQUIRE)
        self._renew = self._redis.register_script(router_scripts.RENEW)
        self._fault = self._redis.register_script(router_scripts.FAULT)
        self._in_flight = self._redis.register_script(router_scripts.IN_FLIGHT)

    def acquire(
        self, servers: Sequence[Server], rollout_id: str, *, lease_seconds: float
    ) -> Assignment | None:
        """Take a slot on the server this rollout used last, else on the least busy one.

        None when every candidate is full or left alone. The slot frees itself after
        `lease_seconds` unless renewed.
        """
        if not servers:
            return None
        token = secrets.token_hex(12)
        keys = [self._sticky_key(rollout_id), f"{self._prefix}:turns", f"{self._prefix}:servers"]
        arguments: list[str | int] = [token, _ms(lease_seconds), _ms(STICKY_SECONDS)]
        for server in servers:
            keys += [self._lease_key(server.id), self._breaker_key(server.id)]
            arguments += [server.id, server.max_in_flight]
        place = int(self._call(self._acquire, keys=keys, args=arguments))
        return Assignment(servers[place - 1], rollout_id, token) if place else None

    def renew(self, assignment: Assignment, *, lease_seconds: float) -> bool:
        """Extend a lease from now; False when it had ended already."""
        keys = [self._lease_key(assignment.server.id)]
        return bool(self._call(self._renew, keys=keys, args=[assignment.token, _ms(lease_seconds)]))

    def release(self, assignment: Assignment) -> None:
        """Free the slot. Idempotent."""
        self._call(self._redis.zrem, self._lease_key(assignment.server.id), assignment.token)

    def report_fault(self, server_id: str) -> float:
        """Count a fault; return for how many seconds the server is now left alone."""
        breaker = self._breaker
        arguments = [
            breaker.faults,
            _ms(breaker.cool_off_seconds),
            _ms(breaker.longest_cool_off_seconds),
        ]
        pause = self._call(self._fault, keys=[self._breaker_key(server_id)], args=arguments)
        return int(pause) / 1000

    def report_success(self, server_id: str) -> None:
        """Forget the server's faults."""
        self._call(self._redis.delete, self._breaker_key(server_id))

    def in_flight(self) -> dict[str, int]:
        """Return how many slots are taken on each server that was ever assigned."""
        members = self._call(self._redis.smembers, f"{self._prefix}:servers")
        ids = sorted(m.decode() if isinstance(m, bytes) else str(m) for m in members)
        if not ids:
            return {}
        loads = self._call(self._in_flight, keys=[self._lease_key(i) for i in ids], args=[])
        return dict(zip(ids, map(int, loads), strict=True))

    def _call(self, command: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return command(*arguments, **named)
        except RedisError as error:
            raise RouterUnavailable(f"the routing store does not answer: {error}") from error

    def _sticky_key(self, rollout_id: str) -> str:
        return f"{self._prefix}:sticky:{rollout_id}"

    def _lease_key(self, server_id: str) -> str:
        return f"{self._prefix}:leases:{server_id}"

    def _breaker_key(self, server_id: str) -> str:
        return f"{self._prefix}:breaker:{server_id}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
