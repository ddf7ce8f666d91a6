"""Stamp sampled tokens with the policy version that sampled them, or say that nobody knows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollouts.inference.protocol import FinishReason, Generation, VersionRun
from rollouts.inference.trace import MIXED_LOGPROBS, UNKNOWN_POLICY_VERSION
from rollouts.services.routable import Routable
from rollouts.services.server_control import weight_version


@dataclass
class Partial:
    """Collect the parts of one turn that updates cut, token by token and version by version."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    seconds: float = 0.0
    last: Generation | None = None
    modes: set[str | None] = field(default_factory=set)

    def add(self, part: Generation, runs: Sequence[VersionRun]) -> None:
        """Append a part; `runs` are the versions of its tokens."""
        for stamp, run in runs:
            if run and self.versions and self.versions[-1][0] == stamp:
                self.versions[-1] = (stamp, self.versions[-1][1] + run)
            elif run:
                self.versions.append((stamp, run))
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.seconds += part.seconds
        self.last = part
        if part.token_ids:
            self.modes.add(part.logprob_mode)

    def keep(self, count: int) -> None:
        """Drop the tokens behind the first `count`."""
        del self.token_ids[count:], self.logprobs[count:]
        versions, self.versions = self.versions, []
        for stamp, run in versions:
            if count > 0:
                self.versions.append((stamp, min(run, count)))
            count -= run

    def as_generation(self, finish_reason: FinishReason, *, version: int) -> Generation:
        """Return the turn; `version` is that of a turn without any token."""
        last = self.versions[-1][0] if self.versions else version
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            policy_version=None if last == UNKNOWN_POLICY_VERSION else last,
            server_id="" if self.last is None else self.last.server_id,
            seconds=self.seconds,
            logprob_mode=MIXED_LOGPROBS if len(self.modes) > 1 else next(iter(self.modes), None),
            version_runs=tuple(self.versions) if len(self.versions) > 1 else (),
            cached_tokens=None if self.last is None else self.last.cached_tokens,
        )


def within_lag(
    runs: Sequence[VersionRun], bound: int, before: tuple[int | None, int | None]
) -> int:
    """Return how many of a turn's first tokens stay within a bound on policy lag.

    `before` are the oldest and newest version of the tokens before, None without any. Tokens of
    an unknown version are within it.
    """
    oldest, newest = before
    kept = 0
    for stamp, run in runs:
        if stamp != UNKNOWN_POLICY_VERSION:
            oldest = stamp if oldest is None else min(oldest, stamp)
            newest = max(oldest if newest is None else newest, stamp)
            if newest - oldest > bound:
                return kept
        kept += run
    return kept


@dataclass(frozen=True)
class Asked:
    """What was known when a request was asked: the version in force and the policy's state.

    `lapsed`: the request was not counted all the time, so that no update waited for it.
    """

    version: int
    policy: Routable | None
    lapsed: bool


def versions_of(
    part: Generation, asked: Asked, read: Callable[[], Routable]
) -> tuple[VersionRun, ...]:
    """Return the versions of a part's tokens: what its server told, else what is certain.

    A server tells runs with the end of its answer. One number for all says what its weights were
    last: as versions rise, it is that of every token where it was in force already when the
    request was asked. Of a server that tells nothing the tokens are of the version in force when
    it was asked as long as no update exchanged weights meanwhile; of UNKNOWN_POLICY_VERSION
    otherwise. `read` reads the policy's state anew.
    """
    count, told = len(part.token_ids), part.policy_version
    if count and sum(run for _, run in part.version_runs) == count:
        return part.version_runs
    if not count or told == asked.version:
        return ((asked.version, count),)
    if told is not None or asked.lapsed or _exchanged_under(part, asked, read()):
        return ((UNKNOWN_POLICY_VERSION, count),)
    return ((asked.version, count),)


def _exchanged_under(part: Generation, asked: Asked, now: Routable) -> bool:
    """Tell whether weights may have been exchanged while a part was sampled.

    The pass of the gate keeps updates from it, but for those that let requests run. While such a
    one is open the server is asked: versions rise, so what it says now held before.
    """
    before = asked.policy
    if before is None or before.version != now.version or before.holds_requests():
        return True
    if before.unheld == now.unheld and not before.exchanges_now():
        return False
    server = next((each for each in before.servers if each.id == part.server_id), None)
    if server is None or not now.exchanges_now():
        return True
    return weight_version(server) != asked.version
