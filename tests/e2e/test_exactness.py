"""The real model through the whole line: every prompt extends the last, token by token."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.tiny_server.model import Model
from examples.tiny_server.weights import load_weights
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from tests.e2e.harness import JSON, Line, wait_until

TEMPERATURE = 0.8
ASSISTANT_MARK = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def real_server(model_cache: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "examples.tiny_server",
            "--port",
            str(port),
            "--cache-dir",
            str(model_cache),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(healthy, "the model server", 120)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def reference(tokenizer_folder: Path) -> Any:
    """Return the tokenizer and template of another implementation."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_each_prompt_is_the_last_one_plus_what_was_sampled_plus_the_template(
    line: Line,
    import_folder: Callable[..., None],
    real_server: str,
    model_cache: Path,
    tokenizer_folder: Path,
    reference: Any,
) -> None:
    policy = line.trainer.call(
        "POST",
        "/policies/",
        {
            "name": "real",
            "model": "smollm2-135m-instruct",
            "tokenizer": str(tokenizer_folder),
            "context_tokens": 2048,
        },
    )
    line.trainer.call(
        "POST", "/inference-servers/", {"policy": "real", "url": real_server, "kind": "vllm"}
    )
    import_folder("real-demo", ROOT / "examples" / "demo_tasks", environment="terminal-demo")
    experiment = line.experiment(
        "real-demo",
        policy=policy["id"],
        sampling={"temperature": TEMPERATURE, "max_tokens": 16},
        budgets={"max_turns": 3},
    )
    rollouts = line.submit(experiment, ["demo/make-file", "demo/make-folder"], samples=3)
    line.wait_done(rollouts, seconds=180)
    trajectories = [line.trajectory(each) for each in rollouts]

    model = Model(load_weights(model_cache))
    multi_turn = 0
    for trajectory in trajectories:
        (segment,) = trajectory["segments"]
        assert segment["parent"] is None
        multi_turn += len(segment["turns"]) > 1
        check_prompts(segment, trajectory["messages"], reference)
        check_logprobs(segment, model)
    assert multi_turn > 0


def check_prompts(segment: JSON, messages: list[JSON], reference: Any) -> None:
    """Compare each prompt with what another implementation of the template makes of it."""
    tokens = segment["prompt_ids"] + segment["response_ids"]
    first = len(segment["prompt_ids"])
    assistants = [place for place, each in enumerate(messages) if each["role"] == "assistant"]
    places = assistants[-len(segment["turns"]) :]
    exact = True
    for turn, place in zip(segment["turns"], places, strict=True):
        prompt = tokens[: first + turn["start"]]
        rendered = reference.apply_chat_template(
            messages[:place], add_generation_prompt=True, tokenize=False
        )
        assert reference.decode(prompt) == rendered
        if exact:
            assert prompt == reference.encode(rendered, add_special_tokens=False)
        sampled = tokens[first + turn["start"] : first + turn["end"]]
        text = messages[place]["content"]
        words = [token for token in sampled if token != reference.eos_token_id]
        exact = exact and reference.encode(text, add_special_tokens=False) == words
    for before, after in pairwise(segment["turns"]):
        between = tokens[first + before["end"] : first + after["start"]]
        assert reference.decode(between).endswith(ASSISTANT_MARK)
        assert sum(segment["response_mask"][before["end"] : after["start"]]) == 0


def check_logprobs(segment: JSON, model: Model) -> None:
    """Recompute every sampled token's log-probability from scratch."""
    tokens = segment["prompt_ids"] + segment["response_ids"]
    logits = np.asarray(model.logits_everywhere(tokens), dtype=np.float64) / TEMPERATURE
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    first = len(segment["prompt_ids"])
    for place, sampled in enumerate(segment["response_mask"]):
        if sampled:
            position = first + place
            expected = logprobs[position - 1, tokens[position]]
            assert segment["response_logprobs"][place] == pytest.approx(expected, abs=1e-3)
