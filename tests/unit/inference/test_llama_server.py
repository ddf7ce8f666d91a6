"""The `llama_cpp` adapter against llama.cpp's own server, where one is built.

`scripts/build-llama-server` builds it into `var/tools`; `PRORL_TEST_LLAMA_SERVER` names another.
The model is the tiny server's, whose numpy forward pass is the independent judge of the
log-probabilities.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from examples.tiny_server.model import Model
from examples.tiny_server.weights import gguf_path, load_weights
from prorl_site.stack.engines import free_port
from rollouts.inference.exceptions import GenerationCancelled, InferenceFault, MalformedAnswer
from rollouts.inference.llama_cpp import LlamaCppAdapter
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.rendering import ConversationRenderer
from tests.unit.inference.conftest import CACHE, ROOT

BINARY = Path(os.environ.get("PRORL_TEST_LLAMA_SERVER") or ROOT / "var/tools/llama-server")
MODEL = "smollm2"  # else it is called by the path of its file
CONTEXT = 1024
START_SECONDS = 60.0
# It multiplies in the file's 4 bits with 8-bit activations, numpy in 32 bits what they stand for.
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.15, 1.5

pytestmark = [
    pytest.mark.skipif(
        not BINARY.is_file(), reason="no llama-server: scripts/build-llama-server builds it"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start llama-server with the tiny server's model; yields it once the model is loaded."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(str(BINARY), "--model", str(gguf_path()), "--alias", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            # Two slots share the context.
            *("--ctx-size", str(2 * CONTEXT), "--parallel", "2", "--no-kv-unified"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            assert process.poll() is None, "llama-server ended"
            assert time.monotonic() < deadline, "llama-server did not become ready"
            time.sleep(0.1)
        yield Server("llama", url, "llama_cpp", MODEL)
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def adapter() -> LlamaCppAdapter:
    return LlamaCppAdapter()


@pytest.fixture(scope="module")
def judge() -> Model:
    return Model(load_weights(CACHE))


@pytest.fixture
def prompt(renderer: ConversationRenderer) -> list[int]:
    return renderer.render([{"role": "user", "content": "Tell a story of a fox in winter."}])


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def sampled(
    adapter: LlamaCppAdapter,
    server: Server,
    prompt: Sequence[int],
    *,
    salt: str | None = None,
    stop: tuple[int, ...] = (),
    **sampling: float,
) -> Generation:
    """Return one turn sampled with these parameters."""
    params = SamplingParams(stop_token_ids=stop, **sampling)  # type: ignore[arg-type]
    return adapter.generate(server, prompt, params, timeout_seconds=120, cache_salt=salt)


def expected_logprobs(
    judge: Model, prompt: Sequence[int], ids: Sequence[int], temperature: float
) -> np.ndarray:
    """Return what numpy's forward pass gives the sampled ids, after temperature."""
    logits = judge.logits_everywhere([*prompt, *ids])[len(prompt) - 1 : -1] / temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    normed = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.asarray(normed[np.arange(len(ids)), list(ids)])


def test_health_tells_the_context_and_the_kind_of_log_probabilities(
    adapter: LlamaCppAdapter, server: Server
) -> None:
    health = adapter.health(server, timeout_seconds=10)
    assert health.ok, health.detail
    assert health.max_model_len == CONTEXT
    assert health.logprob_mode == "processed_logprobs"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_log_probabilities_are_those_of_the_model_after_temperature(
    adapter: LlamaCppAdapter,
    server: Server,
    judge: Model,
    prompt: list[int],
    temperature: float,
) -> None:
    differences: list[float] = []
    for seed in range(4):
        told = sampled(adapter, server, prompt, temperature=temperature, max_tokens=24, seed=seed)
        assert len(told.token_ids) == len(told.logprobs)
        assert told.logprob_mode == "processed_logprobs"
        expected = expected_logprobs(judge, prompt, told.token_ids, temperature)
        differences += np.abs(np.asarray(told.logprobs) - expected).tolist()
    assert np.mean(differences) < MEAN_DIFFERENCE, np.mean(differences)
    assert max(differences) < LARGEST_DIFFERENCE, max(differences)


def test_greedy_turns_are_alike_and_certain(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    first, again = (
        sampled(adapter, server, prompt, temperature=0.0, max_tokens=12) for _ in range(2)
    )
    assert first.token_ids == again.token_ids
    assert first.logprobs == pytest.approx([0.0] * 12, abs=1e-6)


def test_a_seed_gives_the_same_turn_and_another_one_another(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    turns = [
        sampled(adapter, server, prompt, salt="s", max_tokens=24, seed=seed).token_ids
        for seed in (7, 7, 8)
    ]
    assert turns[0] == turns[1] != turns[2]


def test_top_k_and_top_p_count_in_the_log_probabilities(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        told = sampled(adapter, server, prompt, max_tokens=6, seed=1, **narrow)
        assert told.logprobs == pytest.approx([0.0] * 6, abs=1e-6)


def test_a_turn_that_is_too_long_is_cut_at_its_length(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    told = sampled(adapter, server, prompt, temperature=0.0, max_tokens=5)
    assert (len(told.token_ids), told.finish_reason) == (5, "length")
    assert told.server_id == "llama"


def test_a_turn_ends_with_the_models_own_end(
    adapter: LlamaCppAdapter, server: Server, renderer: ConversationRenderer
) -> None:
    prompt = renderer.render([{"role": "user", "content": "Say only: yes"}])
    stop = tuple(renderer.stop_token_ids)

    told = sampled(adapter, server, prompt, temperature=0.0, max_tokens=200, stop=stop)

    assert told.finish_reason == "stop"
    assert told.token_ids[-1] in stop
    assert not set(told.token_ids[:-1]) & set(stop)


def test_any_other_stop_token_ends_a_turn_where_it_comes(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    whole = sampled(adapter, server, prompt, temperature=0.0, max_tokens=16)
    stop = whole.token_ids[6]
    place = whole.token_ids.index(stop)

    told = sampled(adapter, server, prompt, temperature=0.0, max_tokens=16, stop=(stop,))

    assert told.finish_reason == "stop"
    assert told.token_ids == whole.token_ids[: place + 1]


def test_the_next_turn_reuses_the_last_ones_prefix_and_a_salt_forbids_it(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    first = sampled(adapter, server, prompt, temperature=0.0, max_tokens=8)
    longer = [*prompt, *first.token_ids, *prompt]

    warm = sampled(adapter, server, longer, temperature=0.0, max_tokens=4)
    salted = sampled(adapter, server, longer, temperature=0.0, max_tokens=4, salt="another")

    assert warm.cached_tokens is not None
    assert warm.cached_tokens >= len(prompt)
    assert salted.cached_tokens == 0
    assert warm.token_ids == salted.token_ids


def test_an_interrupted_turn_keeps_what_was_sampled_and_can_go_on(
    adapter: LlamaCppAdapter, server: Server, judge: Model, prompt: list[int]
) -> None:
    asked = 0

    def after_a_while() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    params = SamplingParams(temperature=1.0, max_tokens=600, seed=5)
    cut = adapter.generate(server, prompt, params, timeout_seconds=120, interrupted=after_a_while)
    assert cut.finish_reason == "abort"
    assert 0 <= len(cut.token_ids) == len(cut.logprobs) < 600
    rest = sampled(adapter, server, [*prompt, *cut.token_ids], max_tokens=8, seed=6)

    # Its sums differ in their last bits with how much of a prompt it computes at once, so that
    # the most likely tokens of two runs may differ: the judge compares probabilities.
    expected = expected_logprobs(judge, prompt, (*cut.token_ids, *rest.token_ids), 1.0)
    differences = np.abs(np.asarray((*cut.logprobs, *rest.logprobs)) - expected)
    assert differences.mean() < MEAN_DIFFERENCE
    assert differences.max() < LARGEST_DIFFERENCE


def test_a_cancelled_turn_frees_its_slot(
    adapter: LlamaCppAdapter, server: Server, prompt: list[int]
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=900)
    for _ in range(3):  # more than there are slots
        with pytest.raises(GenerationCancelled):
            adapter.generate(server, prompt, params, timeout_seconds=120, cancelled=lambda: True)
    assert len(sampled(adapter, server, prompt, max_tokens=2, seed=1).token_ids) == 2


def test_a_prompt_beyond_the_context_is_refused_and_says_so(
    adapter: LlamaCppAdapter, server: Server
) -> None:
    with pytest.raises(InferenceFault) as raised:
        sampled(adapter, server, [1000] * (CONTEXT + 1), max_tokens=4)
    assert raised.value.code in ("inference.context_full", "inference.rejected")


def test_control_tokens_in_a_prompt_stay_what_they_are(
    adapter: LlamaCppAdapter, server: Server, renderer: ConversationRenderer
) -> None:
    """The server adds no first token to ids, and reads none of them as text."""
    prompt = renderer.render([{"role": "user", "content": "x <|im_end|> y"}])
    body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False}
    told = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()
    assert told["tokens_evaluated"] == len(prompt)


def test_characters_of_several_tokens_are_exact_or_malformed_never_short(
    adapter: LlamaCppAdapter, server: Server, renderer: ConversationRenderer
) -> None:
    prompt = renderer.render([{"role": "user", "content": "Repeat this line: 🦊🦊🦊🦊🦊🦊🦊🦊"}])
    prompt += renderer.render([{"role": "user", "content": "🦊🦊🦊🦊"}])[4:-4]
    for seed in range(6):
        try:
            told = sampled(adapter, server, prompt, max_tokens=24, seed=seed)
        except MalformedAnswer:
            continue
        assert len(told.token_ids) == len(told.logprobs) <= 24


def test_two_turns_at_once_are_those_of_one_after_the_other(
    adapter: LlamaCppAdapter, server: Server, judge: Model
) -> None:
    prompts = [[*range(1000, 1040)], [*range(2000, 2030)]]
    with ThreadPoolExecutor(2) as threads:
        told = list(
            threads.map(lambda each: sampled(adapter, server, each, max_tokens=16, seed=3), prompts)
        )
    for prompt, one in zip(prompts, told, strict=True):
        expected = expected_logprobs(judge, prompt, one.token_ids, 1.0)
        assert np.abs(np.asarray(one.logprobs) - expected).mean() < MEAN_DIFFERENCE
