"""The `/generate` of the reference system's trainers, in the shape that their source gives."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollouts.inference.exceptions import MalformedAnswer, ServerFailed
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.transport import Transport
from rollouts.inference.verl_generate import VerlGenerateAdapter
from tests.shape_servers.misbehaving import Asked, RawServer, whole

SAMPLING = SamplingParams(temperature=0.5, max_tokens=3, top_k=4, stop_token_ids=(7,))
# vLLM's SamplingParams has these among its fields; another name makes the route fail.
TAKEN = {"prompt_ids", "max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed"}


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport()
    yield transport
    transport.close()


def generate(transport: Transport, status: int, body: Any) -> tuple[Generation, Asked]:
    with RawServer(lambda asked: asked.send(whole(status, body))) as raw:
        server = Server("s", raw.url, "verl_generate", "m")
        adapter = VerlGenerateAdapter(transport)
        turn = adapter.generate(server, [1, 2], SAMPLING, timeout_seconds=20)
        return turn, raw.asked[0]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([5, 7], "stop"), ([5, 6, 8], "length"), ([5, 6, 7], "stop"), ([5], "abort"), ([], "abort")],
)
def test_ids_and_logprobs_come_back_and_tell_why_the_turn_ended(
    transport: Transport, ids: list[int], reason: str
) -> None:
    logprobs = [-0.5] * len(ids) or None
    turn, asked = generate(transport, 200, {"response_ids": ids, "logprobs": logprobs})
    assert turn.token_ids == tuple(ids)
    assert turn.logprobs == (-0.5,) * len(ids)
    assert turn.finish_reason == reason
    assert asked.path == "/generate"
    assert asked.body["prompt_ids"] == [1, 2]
    assert set(asked.body) <= TAKEN


@pytest.mark.parametrize(
    "body",
    [
        {"response_ids": [5, 7]},
        {"response_ids": [5, 7], "logprobs": [-0.5]},
        {"response_ids": [5, 7], "logprobs": None},
        {"response_ids": "57", "logprobs": []},
        {"response_ids": [1, 2, 3, 4], "logprobs": [-1.0] * 4},
        {"logprobs": []},
        [],
    ],
)
def test_what_is_misshaped_does_not_pass(transport: Transport, body: Any) -> None:
    with pytest.raises(MalformedAnswer):
        generate(transport, 200, body)


def test_a_failing_server_is_a_fault(transport: Transport) -> None:
    with pytest.raises(ServerFailed):
        generate(transport, 500, {"detail": "Internal Server Error"})


@pytest.mark.parametrize(
    ("paths", "ok"), [({"/generate": {}}, True), ({"/other": {}}, False), (None, False)]
)
def test_health_is_that_the_route_is_there(transport: Transport, paths: Any, ok: bool) -> None:
    def behave(asked: Asked) -> None:
        if asked.path == "/openapi.json":
            asked.send(whole(200, {"paths": paths}))
        else:
            asked.send(whole(500, {}))

    with RawServer(behave) as raw:
        server = Server("s", raw.url, "verl_generate", "m")
        health = VerlGenerateAdapter(transport).health(server, timeout_seconds=20)
    assert health.ok is ok
    assert health.model is None
