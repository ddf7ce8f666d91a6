"""The vLLM adapter lets nothing malformed through, and every fault has its own code."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from examples.tiny_server.json_http import Answer, JsonServer
from rollouts.inference.adapters import AdapterRegistry, default_adapters
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
    UnknownServerKind,
    WrongModel,
)
from rollouts.inference.protocol import SamplingParams, Server
from rollouts.inference.rendering import ConversationRenderer
from rollouts.inference.vllm import VllmAdapter
from tests.scripted_server.server import ScriptedServer, scripted_logprob
from tests.unit.inference.conftest import StartScripted, as_server

IM_END = 2
SAMPLING = SamplingParams(max_tokens=32, stop_token_ids=(IM_END,))


@pytest.fixture
def prompt(renderer: ConversationRenderer) -> list[int]:
    return renderer.render([{"role": "user", "content": "go"}])


@pytest.fixture
def scripted(start_scripted: StartScripted) -> ScriptedServer:
    return start_scripted()


def control(server: ScriptedServer, mode: str, **body: Any) -> None:
    answer = httpx.post(f"{server.url}/_control", json={"mode": mode, **body})
    assert answer.status_code == 200


def state(server: ScriptedServer) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{server.url}/_control").json()
    return body


def test_a_generation_holds_what_was_sampled(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    generation = adapter.generate(as_server(scripted), prompt, SAMPLING, timeout_seconds=10)

    assert generation.token_ids == (2971, IM_END)
    expected = tuple(scripted_logprob(token, i) for i, token in enumerate((2971, IM_END)))
    assert generation.logprobs == expected
    assert (generation.finish_reason, generation.server_id) == ("stop", "scripted")
    assert (generation.policy_version, generation.logprob_mode) == (None, "scripted")


def test_a_cut_answer_says_length(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    generation = adapter.generate(
        as_server(scripted), prompt, SamplingParams(max_tokens=1), timeout_seconds=10
    )
    assert (generation.token_ids, generation.finish_reason) == ((2971,), "length")


@pytest.mark.parametrize(
    ("mode", "fault", "code"),
    [
        ("http500", ServerFailed, "inference.server_error"),
        ("overloaded", ServerOverloaded, "inference.overloaded"),
        ("garbage", MalformedAnswer, "inference.malformed"),
        ("mismatched", MalformedAnswer, "inference.malformed"),
        ("nan", MalformedAnswer, "inference.malformed"),
        ("disconnect", ServerUnreachable, "inference.unreachable"),
    ],
)
def test_a_misbehaving_server_is_a_fault_with_its_code(
    scripted: ScriptedServer,
    adapter: VllmAdapter,
    prompt: list[int],
    mode: str,
    fault: type[InferenceFault],
    code: str,
) -> None:
    control(scripted, mode)

    with pytest.raises(fault) as caught:
        adapter.generate(as_server(scripted), prompt, SAMPLING, timeout_seconds=10)

    assert (caught.value.code, caught.value.server_id) == (code, "scripted")
    control(scripted, "ok")
    adapter.generate(as_server(scripted), prompt, SAMPLING, timeout_seconds=10)


def test_retry_after_is_read(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    control(scripted, "overloaded", count=1)
    with pytest.raises(ServerOverloaded) as caught:
        adapter.generate(as_server(scripted), prompt, SAMPLING, timeout_seconds=10)
    assert caught.value.retry_after_seconds == 1.0


def test_a_hanging_server_times_out_and_is_told(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    control(scripted, "hang", count=1)
    with pytest.raises(GenerationTimeout):
        adapter.generate(as_server(scripted), prompt, SAMPLING, timeout_seconds=0.3)
    wait_until_idle(scripted)


def test_cancel_ends_the_wait_and_the_request(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    control(scripted, "hang", count=1)
    polls: list[bool] = []

    def cancelled() -> bool:
        polls.append(state(scripted)["in_flight"] == 1)
        return polls[-1]

    with pytest.raises(GenerationCancelled):
        adapter.generate(
            as_server(scripted), prompt, SAMPLING, timeout_seconds=60, cancelled=cancelled
        )

    assert polls[-1]
    wait_until_idle(scripted)


def wait_until_idle(scripted: ScriptedServer) -> None:
    deadline = time.monotonic() + 10
    while state(scripted)["in_flight"]:
        assert time.monotonic() < deadline, "the server still works for nobody"
        time.sleep(0.02)


def test_nobody_listens(adapter: VllmAdapter, prompt: list[int]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(ServerUnreachable):
            adapter.generate(Server("s", url, "vllm", "m"), prompt, SAMPLING, timeout_seconds=5)
        assert not adapter.health(Server("s", url, "vllm", "m"), timeout_seconds=5).ok


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1/", "http://[::1"])
def test_an_address_that_is_none(adapter: VllmAdapter, prompt: list[int], url: str) -> None:
    with pytest.raises(ServerUnreachable):
        adapter.generate(Server("s", url, "vllm", "m"), prompt, SAMPLING, timeout_seconds=5)


def test_another_model_is_refused_and_unhealthy(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    server = Server("s", scripted.url, "vllm", "llama-9")
    with pytest.raises(WrongModel):
        adapter.generate(server, prompt, SAMPLING, timeout_seconds=10)
    health = adapter.health(server, timeout_seconds=10)
    assert (health.ok, health.detail) == (False, "serves scripted-not-a-model, not llama-9")


def test_a_request_the_server_refuses_is_ours_to_mend(
    scripted: ScriptedServer, adapter: VllmAdapter
) -> None:
    with pytest.raises(RequestRejected, match="prompt is empty"):
        adapter.generate(as_server(scripted), [], SAMPLING, timeout_seconds=10)


def test_a_full_context_is_noticed_before_and_after_asking(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    known = as_server(scripted, max_model_len=len(prompt) + 31)
    with pytest.raises(ContextFull):
        adapter.generate(known, prompt, SAMPLING, timeout_seconds=10)
    assert state(scripted)["requests"] == 0
    with pytest.raises(ContextFull):
        adapter.generate(
            as_server(scripted), prompt, SamplingParams(max_tokens=32_768), timeout_seconds=10
        )


def test_health_of_real_servers(
    scripted: ScriptedServer, tiny_server: Server, adapter: VllmAdapter
) -> None:
    health = adapter.health(as_server(scripted), timeout_seconds=10)
    assert (health.ok, health.model) == (True, "scripted-not-a-model")
    health = adapter.health(tiny_server, timeout_seconds=10)
    assert (health.ok, health.max_model_len) == (True, 8192)


def test_many_threads_share_one_adapter(
    scripted: ScriptedServer, adapter: VllmAdapter, prompt: list[int]
) -> None:
    control(scripted, "ok", delay_seconds=0.2)
    answers: list[tuple[int, ...]] = []

    def work() -> None:
        server = as_server(scripted)
        answers.append(adapter.generate(server, prompt, SAMPLING, timeout_seconds=30).token_ids)

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [(2971, IM_END)] * 64
    assert state(scripted)["peak_in_flight"] > 16


GOOD: dict[str, Any] = {
    "token_ids": [5, 6],
    "logprobs": {"token_logprobs": [-0.1, -0.2]},
    "finish_reason": "stop",
}


@pytest.fixture
def answering() -> Iterator[tuple[Server, dict[str, Any]]]:
    """Serve whatever body the test puts into the dictionary."""
    body: dict[str, Any] = {}
    http = JsonServer(("127.0.0.1", 0), {("POST", "/v1/completions"): lambda _: Answer(body)})
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Server("s", http.url, "vllm", "m"), body
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"token_ids": None}, id="no ids"),
        pytest.param({"token_ids": []}, id="no tokens"),
        pytest.param({"token_ids": [5, "6"]}, id="text id"),
        pytest.param({"token_ids": [5, True]}, id="boolean id"),
        pytest.param({"token_ids": [5, -6]}, id="negative id"),
        pytest.param({"token_ids": [5, 10**30]}, id="huge id"),
        pytest.param({"token_ids": list(range(33))}, id="more than asked"),
        pytest.param({"logprobs": None}, id="no logprobs"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1]}}, id="too few"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, None]}}, id="null"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, True]}}, id="boolean"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, 0.5]}}, id="above zero"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, float("nan")]}}, id="nan"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, float("-inf")]}}, id="infinite"),
        pytest.param({"logprobs": {"token_logprobs": [-0.1, -(10**400)]}}, id="huge"),
        pytest.param({"finish_reason": None}, id="unfinished"),
        pytest.param({"finish_reason": "tool"}, id="unknown reason"),
    ],
)
def test_a_malformed_choice_never_passes(
    answering: tuple[Server, dict[str, Any]], adapter: VllmAdapter, choice: dict[str, Any]
) -> None:
    server, body = answering
    body["choices"] = [GOOD]
    assert adapter.generate(server, [1], SAMPLING, timeout_seconds=10).token_ids == (5, 6)

    body["choices"] = [{**GOOD, **choice}]

    with pytest.raises(MalformedAnswer):
        adapter.generate(server, [1], SAMPLING, timeout_seconds=10)


@pytest.mark.parametrize("choices", [None, [], [GOOD, GOOD], {}, [None], "text"])
def test_malformed_choices_never_pass(
    answering: tuple[Server, dict[str, Any]], adapter: VllmAdapter, choices: Any
) -> None:
    server, body = answering
    body["choices"] = choices
    with pytest.raises(MalformedAnswer):
        adapter.generate(server, [1], SAMPLING, timeout_seconds=10)


def test_the_servers_own_version_is_kept(
    answering: tuple[Server, dict[str, Any]], adapter: VllmAdapter
) -> None:
    server, body = answering
    versions = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    body["choices"] = [{**GOOD, "weight_versions": versions}]
    generation = adapter.generate(server, [1], SAMPLING, timeout_seconds=10)
    assert generation.policy_version == 8


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(UnknownServerKind, match="'telepathy'; known kinds: llama_cpp, openai, sgl"):
        default_adapters()["telepathy"]
    assert "vllm" in default_adapters()
    assert list(AdapterRegistry({})) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"max_tokens": 0},
    ],
)
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
