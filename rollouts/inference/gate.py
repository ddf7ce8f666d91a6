"""The gate of each policy: who generates holds a pass, and a closed gate gives out none.

Shared by all workers through the broker's store. "Nobody is inside" is certain, not hoped: closing
and counting are one step, entering and being counted another, and passes are leases, so that a
dead worker's end by themselves. What the store forgets (its data lost) holders write again when
they renew; until every one of them has had the time to, the count is known not to be whole.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.keeping import Keeper

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
# Hundreds of threads must not open a connection each: a client's pool refuses more than 100.
CALLS_AT_ONCE = 8
RENEWED_AT_ONCE = 500

# KEYS: mark, passes, since, epoch. ARGV: token, lease ms.
# Returns {mark of who closed it, '' when entered; store's time ms; epoch}.
_ENTER = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', KEYS[3], now, 'NX')
local mark = redis.call('GET', KEYS[1])
if mark then return {mark, now, ''} end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
return {'', now, redis.call('GET', KEYS[4]) or ''}
"""

# KEYS: passes, since. ARGV: lease ms, then token and store's time of the last renewal of each.
# Returns for each the store's time ms, or 0 when it had lapsed while the store knew of it. A lease
# of 0 gives the passes back.
_RENEW = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', KEYS[2], now, 'NX')
local since, lease, found = tonumber(redis.call('GET', KEYS[2])), tonumber(ARGV[1]), {}
for at = 2, #ARGV, 2 do
  local ends = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[at]) or '0')
  local forgotten = ends == 0 and since > tonumber(ARGV[at + 1])
  local valid = ends > now or forgotten
  if lease == 0 then
    redis.call('ZREM', KEYS[1], ARGV[at])
  elseif valid then
    redis.call('ZADD', KEYS[1], now + lease, ARGV[at])
  end
  found[#found + 1] = valid and now or 0
end
return found
"""

# KEYS: mark, passes, since. ARGV: mark. Closes the gate; returns {passes held, ms since the store
# has known of all passes}.
_CLOSE = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', KEYS[3], now, 'NX')
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
return {redis.call('ZCARD', KEYS[2]), now - tonumber(redis.call('GET', KEYS[3]))}
"""

# KEYS: passes. Returns how many are held.
_COUNT = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
return redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf')
"""

# KEYS: since. Notes the time from which on the store knows of all passes, where it is not noted.
_KNOW = """
local now = redis.call('TIME')
redis.call('SET', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000), 'NX')
return 1
"""

# KEYS: mark, epoch. ARGV: mark, epoch or ''. Opens the gate where this mark closed it.
_OPEN = """
local known = tonumber(redis.call('GET', KEYS[2]) or '-1')
if ARGV[2] ~= '' and tonumber(ARGV[2]) > known then redis.call('SET', KEYS[2], ARGV[2]) end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

# KEYS: passes, epoch. ARGV: token, epoch. Notes the epoch where the store still knows the pass:
# one whose data was lost since must not look as if it knew who closed the gate.
_TELL = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
local known = tonumber(redis.call('GET', KEYS[2]) or '-1')
if tonumber(ARGV[2]) > known then redis.call('SET', KEYS[2], ARGV[2]) end
return 1
"""


@dataclass(slots=True, eq=False)
class Pass:
    """The right to have one request under way.

    `renewed` is the store's time in ms, `renewed_at` the monotonic time before it was asked;
    `epoch` the weights' epoch that the store knows, None when it knows nothing of the policy.
    `lapsed` once the store counted the pass no longer, though the request went on: it stays so.
    """

    policy_id: str
    token: str
    renewed: int
    epoch: int | None
    renewed_at: float
    lapsed: bool = False
    given_back: bool = False


@dataclass(frozen=True, slots=True)
class Shut:
    """Say by whom the gate is closed."""

    mark: str


@dataclass(frozen=True, slots=True)
class Inside:
    """Say how many passes are held, and for how long the store has known of all of them."""

    count: int
    known_seconds: float


class PolicyGate:
    """Give out and count passes. Thread-safe.

    Every method but `leave` raises RouterUnavailable without the store.
    """

    def __init__(
        self, redis_client: "Redis", namespace: str, *, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        redis: Any = redis_client
        self._redis = redis
        self._prefix = f"{{{namespace}:inference}}:gate"
        self.lease_seconds = lease_seconds
        self._calls = threading.BoundedSemaphore(CALLS_AT_ONCE)
        self._keeper = Keeper("gate-passes", self._renew_kept, period_seconds=lease_seconds / 3)
        self._enter = redis.register_script(_ENTER)
        self._renew = redis.register_script(_RENEW)
        self._close = redis.register_script(_CLOSE)
        self._open = redis.register_script(_OPEN)
        self._count = redis.register_script(_COUNT)
        self._know = redis.register_script(_KNOW)
        self._tell = redis.register_script(_TELL)

    def enter(self, policy_id: str, token: str) -> Pass | Shut:
        """Take a pass, renewed from now on until it is given back or this process ends."""
        began = time.monotonic()
        keys = self._keys(policy_id, "mark", "passes", "since", "epoch")
        mark, now, epoch = self._call(self._enter, keys=keys, args=[token, self._lease_ms()])
        if _text(mark):
            return Shut(_text(mark))
        told = _text(epoch)
        entered = Pass(policy_id, token, int(now), int(told) if told else None, began)
        self._keeper.hold(entered)
        return entered

    def renew(self, passes: Sequence[Pass]) -> None:
        """Extend passes of one policy from now, in one step; note those that lapsed."""
        for held, renewed in zip(passes, self._touch(passes, self._lease_ms()), strict=True):
            # One that was given back meanwhile is not there, and did not lapse.
            held.lapsed |= not renewed and not held.given_back

    def leave(self, held: Pass) -> None:
        """Give a pass back, and note whether it was counted until now. Idempotent.

        A store that does not answer is no error: what it was told last decides.
        """
        if held.given_back:
            return
        held.given_back = True
        self._keeper.drop(held)
        try:
            held.lapsed |= not all(self._touch([held], 0))
        except RouterUnavailable:
            held.lapsed |= time.monotonic() - held.renewed_at >= self.lease_seconds

    def _touch(self, passes: Sequence[Pass], lease_ms: int) -> list[bool]:
        """Renew passes, or give them back; return which of them were counted until now."""
        began = time.monotonic()
        keys = self._keys(passes[0].policy_id, "passes", "since")
        named = [value for each in passes for value in (each.token, each.renewed)]
        times = [int(now) for now in self._call(self._renew, keys=keys, args=[lease_ms, *named])]
        for held, now in zip(passes, times, strict=True):
            if now:
                held.renewed, held.renewed_at = now, began
        return [now > 0 for now in times]

    def _renew_kept(self, passes: list[Pass]) -> None:
        kept: dict[str, list[Pass]] = {}
        for each in passes:
            if not each.lapsed:
                kept.setdefault(each.policy_id, []).append(each)
        try:
            for of_policy in kept.values():
                for at in range(0, len(of_policy), RENEWED_AT_ONCE):
                    self.renew(of_policy[at : at + RENEWED_AT_ONCE])
        except RouterUnavailable as fault:
            logger.warning("passes of the gate are not renewed: %s", fault)

    def close(self, policy_id: str, mark: str) -> Inside:
        """Close the gate, or assert that it is closed; return who is still inside."""
        keys = self._keys(policy_id, "mark", "passes", "since")
        count, known = self._call(self._close, keys=keys, args=[mark])
        return Inside(int(count), int(known) / 1000)

    def inside(self, policy_id: str) -> int:
        """Return how many passes are held, whether the gate is open or not."""
        return int(self._call(self._count, keys=self._keys(policy_id, "passes"), args=[]))

    def is_empty(self, inside: Inside) -> bool:
        """Tell whether it is certain that nobody is inside."""
        return inside.count == 0 and inside.known_seconds >= self.lease_seconds

    def open(self, policy_id: str, mark: str, *, epoch: int | None = None) -> bool:
        """Open the gate where this mark closed it, and note the epoch of the weights."""
        keys = self._keys(policy_id, "mark", "epoch")
        return bool(self._call(self._open, keys=keys, args=[mark, "" if epoch is None else epoch]))

    def tell(self, held: Pass, epoch: int) -> None:
        """Have the store know the epoch that its holder of a pass read from the database."""
        keys = self._keys(held.policy_id, "passes", "epoch")
        self._call(self._tell, keys=keys, args=[held.token, epoch])

    def know(self, policy_id: str) -> None:
        """Have the store note since when it knows of all passes, before it is asked."""
        self._call(self._know, keys=self._keys(policy_id, "since"), args=[])

    def _lease_ms(self) -> int:
        return max(1, round(self.lease_seconds * 1000))

    def _keys(self, policy_id: str, *names: str) -> list[str]:
        return [f"{self._prefix}:{policy_id}:{name}" for name in names]

    def _call(self, command: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            with self._calls:
                return command(*arguments, **named)
        except RedisError as error:
            raise RouterUnavailable(f"the routing store does not answer: {error}") from error


def _text(value: bytes | str | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
