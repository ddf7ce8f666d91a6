"""Every way in which a server can fail has its fault; nothing malformed becomes a turn."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from rollouts.inference.asking import Asker
from rollouts.inference.exceptions import (
    ContextFull,
    GenerationCancelled,
    GenerationTimeout,
    InferenceFault,
    MalformedAnswer,
    RequestRejected,
    ServerFailed,
    ServerOverloaded,
    ServerUnreachable,
    WrongModel,
)
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import VllmAdapter, VllmAnswer
from tests.shape_servers.misbehaving import (
    STREAM_HEAD,
    STREAM_TAIL,
    Asked,
    Behave,
    RawServer,
    event,
    whole,
)

SAMPLING = SamplingParams(max_tokens=4)


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport()
    yield transport
    transport.close()


def ask(transport: Transport, behave: Behave, **named: Any) -> Generation:
    with RawServer(behave) as raw:
        server = Server("bad", raw.url, "vllm", "m")
        named.setdefault("timeout_seconds", 20)
        return VllmAdapter(transport).generate(server, [1, 2], SAMPLING, **named)


def answers(status: int, body: bytes | dict[str, Any], **headers: str) -> Behave:
    return lambda asked: asked.send(whole(status, body, **headers))


def choice(**changes: Any) -> dict[str, Any]:
    good = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.1, -0.2]},
        "finish_reason": "stop",
    }
    return {"model": "m", "choices": [{**good, **changes}]}


def streams(*bodies: dict[str, Any] | bytes, tail: bytes = STREAM_TAIL) -> Behave:
    def behave(asked: Asked) -> None:
        asked.send(STREAM_HEAD + b"".join(map(event, bodies)) + tail)

    return behave


DONE = b"[DONE]"
FIRST = choice(token_ids=[5], logprobs={"token_logprobs": [-0.1]}, finish_reason=None)
LAST = choice(token_ids=[6], logprobs={"token_logprobs": [-0.2]}, finish_reason="stop")


def after(data: bytes, then: Callable[[Asked], object]) -> Behave:
    def behave(asked: Asked) -> None:
        asked.send(data)
        then(asked)

    return behave


NAN_BODY = json.dumps(choice(logprobs={"token_logprobs": [-0.1, float("nan")]})).encode()
BEGUN = STREAM_HEAD + event(FIRST)
HALF = whole(200, choice())[:-20]

CASES: list[tuple[str, Behave, type[InferenceFault]]] = [
    ("reset before the answer", lambda asked: asked.reset(), ServerUnreachable),
    ("reset in the body", after(HALF, lambda asked: asked.reset()), ServerUnreachable),
    ("reset in the stream", after(BEGUN, lambda asked: asked.reset()), ServerUnreachable),
    ("truncated body", after(HALF, lambda _: None), ServerUnreachable),
    ("truncated stream", after(BEGUN, lambda _: None), ServerUnreachable),
    ("stream without an end", streams(FIRST), ServerUnreachable),
    ("stream done without a reason", streams(FIRST, DONE), ServerUnreachable),
    ("empty stream", streams(DONE), ServerUnreachable),
    ("no HTTP", lambda asked: asked.send(b"hello\r\n\r\n"), ServerUnreachable),
    ("429", answers(429, {"error": "busy"}), ServerOverloaded),
    ("503 that says when", answers(503, b"", Retry_After="2"), ServerOverloaded),
    ("503", answers(503, b""), ServerFailed),
    ("500", answers(500, b"oops"), ServerFailed),
    ("502 page", answers(502, b"<html>bad gateway</html>"), ServerFailed),
    ("error in the stream", streams(FIRST, {"error": {"code": 500}}, DONE), ServerFailed),
    ("reason error", streams(FIRST, choice(finish_reason="error"), DONE), ServerFailed),
    ("404 model", answers(404, {"error": {"message": "The model `m` ..."}}), WrongModel),
    ("another model", answers(200, {**choice(), "model": "n"}), WrongModel),
    ("another model streams", streams({**FIRST, "model": "n"}), WrongModel),
    ("404", answers(404, b"Not Found"), RequestRejected),
    ("400", answers(400, {"error": "no"}), RequestRejected),
    ("redirect", answers(307, b"", Location="http://127.0.0.1:9/"), RequestRejected),
    ("too long", answers(400, b"This model's maximum context length is 8"), ContextFull),
    ("web page", answers(200, b"<html>welcome</html>"), MalformedAnswer),
    ("no text", answers(200, b"\xff\xfe{"), MalformedAnswer),
    ("no object", answers(200, b"[1]"), MalformedAnswer),
    ("deep", answers(200, b"[" * 100_000), MalformedAnswer),
    ("no choice", answers(200, {"choices": []}), MalformedAnswer),
    ("web page streams", streams(b"<html>"), MalformedAnswer),
    ("no text streams", streams(b'{"a": "\xff"}'), MalformedAnswer),
    ("nan", answers(200, NAN_BODY), MalformedAnswer),
    ("nan streams", streams(NAN_BODY), MalformedAnswer),
    ("infinity", streams(NAN_BODY.replace(b"NaN", b"-Infinity")), MalformedAnswer),
    ("lengths", streams(choice(token_ids=[5])), MalformedAnswer),
    ("no logprobs", streams(choice(logprobs=None)), MalformedAnswer),
    ("id too large", streams(choice(token_ids=[5, 2**31])), MalformedAnswer),
    ("id below zero", streams(choice(token_ids=[5, -1])), MalformedAnswer),
    ("too many", streams(FIRST, FIRST, FIRST, FIRST, LAST), MalformedAnswer),
    ("after the end", streams(LAST, LAST, DONE), MalformedAnswer),
    (
        "nothing sampled",
        streams(choice(token_ids=[], logprobs=None), DONE),
        MalformedAnswer,
    ),
    ("other prompt", streams({**choice(prompt_token_ids=[1, 3])}), MalformedAnswer),
    (
        "a lost event",
        streams(LAST, {"choices": [], "usage": {"completion_tokens": 2}}, DONE),
        MalformedAnswer,
    ),
    (
        "versions with a gap",
        streams(choice(weight_versions=[{"version": "1", "start": 1, "end": 2}]), DONE),
        MalformedAnswer,
    ),
    (
        "versions of too few",
        streams(choice(weight_versions=[{"version": "1", "start": 0, "end": 1}]), DONE),
        MalformedAnswer,
    ),
]


@pytest.mark.parametrize(
    ("behave", "fault"), [pytest.param(how, why, id=name) for name, how, why in CASES]
)
def test_each_misbehaviour_is_a_fault(
    transport: Transport, behave: Behave, fault: type[InferenceFault]
) -> None:
    with pytest.raises(InferenceFault) as caught:
        ask(transport, behave)
    assert (type(caught.value), caught.value.server_id) == (fault, "bad")


def test_the_same_server_well_behaved(transport: Transport) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    streamed = ask(transport, streams(FIRST, LAST, usage, DONE))
    whole_one = ask(transport, answers(200, choice()))
    assert streamed.token_ids == whole_one.token_ids == (5, 6)
    assert streamed.logprobs == whole_one.logprobs == (-0.1, -0.2)
    assert streamed.finish_reason == whole_one.finish_reason == "stop"


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("3", 3.0, 3.0),
        ("1e9", 600.0, 600.0),
        ("soon", None, None),
        ("-1", None, None),
        ("nan", None, None),
        (timedelta(seconds=400), 300.0, 400.0),
        (timedelta(days=-9000), 0.0, 0.0),
    ],
)
def test_retry_after_is_read(
    transport: Transport, header: str | timedelta, least: float | None, most: float | None
) -> None:
    if isinstance(header, timedelta):
        header = format_datetime(datetime.now(UTC) + header, usegmt=True)
    with pytest.raises(ServerOverloaded) as caught:
        ask(transport, answers(429, b"", Retry_After=header))
    seconds = caught.value.retry_after_seconds
    if least is None or most is None:
        assert seconds is None
    else:
        assert seconds is not None
        assert least <= seconds <= most


@pytest.mark.parametrize("head", [b"", BEGUN], ids=["before the answer", "in the stream"])
def test_a_silent_server_times_out_and_is_left(transport: Transport, head: bytes) -> None:
    left: list[bool] = []

    def behave(asked: Asked) -> None:
        asked.send(head)
        left.append(asked.gone(20))
        done.set()

    done = threading.Event()
    with pytest.raises(GenerationTimeout):
        ask(transport, behave, timeout_seconds=0.3)
    assert done.wait(20)
    assert left == [True]


def test_an_endless_event_is_given_up(transport: Transport) -> None:
    part = b"100000\r\n" + b"x" * 2**20 + b"\r\n"

    def behave(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        for _ in range(64):
            asked.send(part)

    with pytest.raises(MalformedAnswer, match="an event is larger than"):
        ask(transport, behave)


def test_an_endless_body_is_given_up(transport: Transport) -> None:
    def behave(asked: Asked) -> None:
        asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        for _ in range(128):
            asked.send(b" " * 2**20)

    with pytest.raises(MalformedAnswer, match="sent more than"):
        ask(transport, behave)


def test_a_server_that_cannot_stream_is_asked_whole(transport: Transport) -> None:
    def behave(asked: Asked) -> None:
        if "stream" in asked.body:
            asked.send(whole(400, {"error": {"message": "stream must be false"}}))
        else:
            asked.send(whole(200, choice()))

    with RawServer(behave) as raw:
        adapter, server = VllmAdapter(transport), Server("s", raw.url, "vllm", "m")
        turns = [
            adapter.generate(server, [1], SAMPLING, timeout_seconds=20).token_ids for _ in range(2)
        ]
        streamed = ["stream" in asked.body for asked in raw.asked]

    assert turns == [(5, 6), (5, 6)]
    assert streamed == [True, False, False]


@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a token"])
def test_an_interrupted_turn_keeps_what_was_sampled(transport: Transport, first: bool) -> None:
    arrived, left = threading.Event(), threading.Event()

    def behave(asked: Asked) -> None:
        asked.send(BEGUN if first else STREAM_HEAD)
        arrived.set()
        if asked.gone(20):
            left.set()

    with RawServer(behave) as raw:
        answer = VllmAnswer(Server("bad", raw.url, "vllm", "m"), [1, 2], SAMPLING)
        turn = Asker(transport).ask(
            "/v1/completions",
            {},
            answer,
            timeout_seconds=20,
            cancelled=None,
            interrupted=(lambda: answer.ids == [5]) if first else arrived.is_set,
        )
        assert left.wait(20)

    assert turn.finish_reason == "abort"
    assert (turn.token_ids, turn.logprobs) == (((5,), (-0.1,)) if first else ((), ()))


def test_a_cancelled_turn_is_dropped(transport: Transport) -> None:
    arrived, left = threading.Event(), threading.Event()

    def behave(asked: Asked) -> None:
        asked.send(BEGUN)
        arrived.set()
        if asked.gone(20):
            left.set()

    with pytest.raises(GenerationCancelled):
        ask(transport, behave, cancelled=arrived.is_set)
    assert left.wait(20)


def test_a_server_may_cut_a_turn_itself(transport: Transport) -> None:
    aborted = choice(token_ids=[], logprobs=None, finish_reason="abort")
    turn = ask(transport, streams(FIRST, aborted, DONE))
    assert (turn.token_ids, turn.finish_reason) == ((5,), "abort")
    nothing = ask(transport, streams(aborted, DONE))
    assert (nothing.token_ids, nothing.finish_reason) == ((), "abort")


def test_what_a_callback_raises_is_raised(transport: Transport) -> None:
    asked_twice: list[bool] = []

    def broken() -> bool:
        asked_twice.append(True)
        if len(asked_twice) > 1:
            raise LookupError("the caller's own")
        return False

    with pytest.raises(LookupError, match="the caller's own"):
        ask(transport, lambda asked: asked.reset() if asked.gone(20) else None, cancelled=broken)


def test_many_callers_wait_on_two_threads(transport: Transport) -> None:
    """A caller costs its own thread and no other, however long it waits."""
    stop = threading.Event()
    faults: list[type[BaseException]] = []

    def call(server: Server) -> None:
        try:
            VllmAdapter(transport).generate(
                server, [1], SAMPLING, timeout_seconds=60, cancelled=stop.is_set
            )
        except GenerationCancelled as fault:
            faults.append(type(fault))

    arrived = threading.Semaphore(0)

    def behave(asked: Asked) -> None:
        arrived.release()
        asked.gone(60)

    with RawServer(behave) as raw:
        server = Server("s", raw.url, "vllm", "m")
        callers = [threading.Thread(target=call, args=(server,)) for _ in range(64)]
        for caller in callers:
            caller.start()
        for _ in callers:
            assert arrived.acquire(timeout=30)
        ours = [t.name for t in threading.enumerate() if t.name.startswith("inference")]
        stop.set()
        for caller in callers:
            caller.join(30)

    assert sorted(set(ours)) == ["inference", "inference-watch"]
    assert faults == [GenerationCancelled] * 64
