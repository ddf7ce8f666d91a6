"""llama.cpp's own server and chat servers, in the shapes that their sources give."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from rollouts.inference.adapters import (
    as_chat_adapter,
    as_token_adapter,
    default_adapters,
    is_chat,
)
from rollouts.inference.control import control_for
from rollouts.inference.exceptions import (
    ContextFull,
    MalformedAnswer,
    RequestRejected,
    ServerUnreachable,
    UnknownServerKind,
)
from rollouts.inference.llama_cpp import LlamaCppAdapter
from rollouts.inference.openai_chat import OpenAIChatAdapter
from rollouts.inference.parsed import ParsedTurn, ToolCall
from rollouts.inference.protocol import ChatAnswer, Generation, SamplingParams, Server
from rollouts.inference.transport import Transport
from tests.shape_servers.misbehaving import (
    STREAM_HEAD,
    STREAM_TAIL,
    Asked,
    RawServer,
    event,
    whole,
)

SAMPLING = SamplingParams(temperature=0.5, max_tokens=8, stop_token_ids=(7,))
MESSAGES = [{"role": "user", "content": "What time is it?"}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


@pytest.fixture
def transport() -> Iterator[Transport]:
    transport = Transport()
    yield transport
    transport.close()


def token(number: int, prob: float) -> dict[str, Any]:
    entry = {"id": number, "token": "x", "bytes": [120], "prob": prob, "top_probs": []}
    return {
        "index": 0,
        "content": "x",
        "tokens": [number],
        "stop": False,
        "completion_probabilities": [entry],
    }


def last(count: int, stop_type: str) -> dict[str, Any]:
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "stop": True,
        "stop_type": stop_type,
        "tokens_predicted": count,
        "timings": {"cache_n": 2},
    }


def llama(transport: Transport, *events: dict[str, Any]) -> tuple[Generation, Asked]:
    def behave(asked: Asked) -> None:
        asked.send(STREAM_HEAD + b"".join(map(event, events)))
        # Whoever wants more than was sent finds the connection closed.
        asked.send(STREAM_TAIL)

    with RawServer(behave) as raw:
        server = Server("s", raw.url, "llama_cpp", "m")
        turn = LlamaCppAdapter(transport).generate(server, [1, 2], SAMPLING, timeout_seconds=20)
        return turn, raw.asked[0]


def test_llama_cpp_gives_probabilities_after_sampling(transport: Transport) -> None:
    turn, asked = llama(transport, token(5, 0.5), token(2, 0.25), last(2, "eos"))

    assert turn.token_ids == (5, 2)
    assert turn.logprobs == (math.log(0.5), math.log(0.25))
    assert (turn.finish_reason, turn.cached_tokens) == ("stop", 2)
    assert turn.logprob_mode == "processed_logprobs"
    assert asked.body["post_sampling_probs"] is True
    assert asked.body["samplers"] == ["temperature", "top_k", "top_p"]


def test_llama_cpp_stops_at_our_own_stop_tokens(transport: Transport) -> None:
    turn, _ = llama(transport, token(5, 0.5), token(7, 1.0), token(8, 0.5), last(3, "limit"))
    assert (turn.token_ids, turn.finish_reason) == ((5, 7), "stop")


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([token(5, 0.5), last(2, "eos")], id="a token inside a character"),
        pytest.param([token(5, 0.0), last(1, "eos")], id="no probability"),
        pytest.param([token(5, 0.5), last(1, "none")], id="no reason"),
        pytest.param([{**token(5, 0.5), "tokens": [6]}, last(1, "eos")], id="another token"),
        pytest.param([{**token(5, 0.5), "completion_probabilities": []}], id="none told"),
    ],
)
def test_llama_cpp_malformed(transport: Transport, events: list[dict[str, Any]]) -> None:
    with pytest.raises(MalformedAnswer):
        llama(transport, *events)


def test_llama_cpp_cut_off(transport: Transport) -> None:
    with pytest.raises(ServerUnreachable):
        llama(transport, token(5, 0.5))


def test_llama_cpp_health_and_context(transport: Transport) -> None:
    def behave(asked: Asked) -> None:
        match asked.path:
            case "/v1/models":
                asked.send(whole(200, {"data": [{"id": "m"}]}))
            case "/props":
                asked.send(whole(200, {"default_generation_settings": {"n_ctx": 512}}))
            case "/completion":
                error = {"code": 400, "type": "exceed_context_size_error", "message": "no"}
                asked.send(whole(400, {"error": error}))
            case _:
                asked.send(whole(200, {"status": "ok"}))

    with RawServer(behave) as raw:
        adapter, server = LlamaCppAdapter(transport), Server("s", raw.url, "llama_cpp", "m")
        health = adapter.health(server, timeout_seconds=20)
        with pytest.raises(ContextFull):
            adapter.generate(server, [1], SAMPLING, timeout_seconds=20)

    assert (health.ok, health.max_model_len) == (True, 512)


def chat(
    transport: Transport, message: dict[str, Any], reason: str = "stop", **more: Any
) -> ChatAnswer:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    body = {"model": "m-2026", "choices": [choice], **more}
    with RawServer(lambda asked: asked.send(whole(200, body))) as raw:
        server = Server("s", f"{raw.url}/v1", "openai", "m")
        return OpenAIChatAdapter(transport).chat(
            server, MESSAGES, TOOLS, SAMPLING, timeout_seconds=20
        )


def test_chat_reads_text_thoughts_and_calls(transport: Transport) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{"}}
    no_object = {"id": "c3", "type": "function", "function": {"name": "clock", "arguments": "[]"}}
    message = {
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [call, broken, no_object],
    }

    answer = chat(
        transport, message, "tool_calls", usage={"prompt_tokens": 9, "completion_tokens": 4}
    )

    parsed = answer.parsed
    assert (parsed.content, parsed.reasoning) == ("", "hm")
    assert parsed.calls[0] == ToolCall("c1", "clock", {"a": 1})
    assert [call.arguments for call in parsed.calls[1:]] == [None, None]
    assert parsed.calls[1].complaint.startswith("The arguments of clock are not JSON")
    assert parsed.calls[2].complaint.startswith("The arguments of clock are no JSON object.")
    assert (answer.finish_reason, answer.prompt_tokens, answer.sampled_tokens) == ("stop", 9, 4)


def test_chat_cut_at_its_length(transport: Transport) -> None:
    answer = chat(transport, {"content": "It is"}, "length")
    assert (answer.parsed, answer.finish_reason) == (ParsedTurn("It is"), "length")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": ""}, "stop"),
        ({"content": 5}, "stop"),
        ({"content": "x"}, None),
        ({"content": "x"}, "error"),
        ({"content": "x", "tool_calls": [{"id": "1"}]}, "tool_calls"),
    ],
)
def test_chat_malformed(transport: Transport, message: dict[str, Any], reason: Any) -> None:
    with pytest.raises(MalformedAnswer):
        chat(transport, message, reason)


def test_a_key_goes_to_its_own_host_alone(transport: Transport) -> None:
    body = {"data": [{"id": "m"}]}
    with RawServer(lambda asked: asked.send(whole(401, b"key refused"))) as raw:
        server = Server("s", raw.url, "openai", "m")
        for keys in ({"127.0.0.1": "sk-secret"}, {"api.example.org": "sk-secret"}):
            adapter = OpenAIChatAdapter(transport, api_keys=keys)
            with pytest.raises(RequestRejected) as caught:
                adapter.chat(server, MESSAGES, [], SAMPLING, timeout_seconds=20)
            assert "sk-secret" not in f"{caught.value} {adapter!r}"
        sent = [asked.headers.get("authorization") for asked in raw.asked]
        raw.behave = lambda asked: asked.send(whole(200, body))
        health = OpenAIChatAdapter(transport).health(server, timeout_seconds=20)

    assert sent == ["Bearer sk-secret", None]
    assert (health.ok, health.detail) == (True, "serves m, as text alone")


def test_an_older_server_is_asked_in_its_words(transport: Transport) -> None:
    def behave(asked: Asked) -> None:
        if "max_completion_tokens" in asked.body:
            asked.send(whole(400, {"error": "unknown field max_completion_tokens"}))
        else:
            message = {"role": "assistant", "content": "noon"}
            choice = {"message": message, "finish_reason": "stop"}
            asked.send(whole(200, {"choices": [choice]}))

    with RawServer(behave) as raw:
        adapter, server = OpenAIChatAdapter(transport), Server("s", raw.url, "openai", "m")
        for _ in range(2):
            answer = adapter.chat(server, MESSAGES, [], SAMPLING, timeout_seconds=20)
            assert answer.parsed.content == "noon"
        assert [asked.body.get("max_tokens") for asked in raw.asked] == [None, 8, 8]


def test_kinds_are_told_apart(transport: Transport) -> None:
    adapters = default_adapters(transport=transport)
    assert [kind for kind in adapters if is_chat(adapters[kind])] == ["openai"]
    with pytest.raises(UnknownServerKind, match="text alone"):
        as_token_adapter(adapters["openai"], "openai")
    with pytest.raises(UnknownServerKind, match="token ids"):
        as_chat_adapter(adapters["vllm"], "vllm")
    assert [kind for kind in adapters if control_for(kind) is not None] == [
        "vllm",
        "vllm_generate",
        "sglang",
    ]
