"""The scripted server plays its script and says at every turn that it is no model."""

import json
from pathlib import Path

import httpx
import pytest

from rollouts.inference.protocol import SamplingParams, Server
from rollouts.inference.rendering import ConversationRenderer
from rollouts.inference.vllm import VllmAdapter
from tests.scripted_server.server import MODEL_NAME
from tests.unit.inference.conftest import StartScripted, as_server, module_process

DEMONSTRATION = [
    {"role": "user", "content": "List the files."},
    {"role": "assistant", "content": "ls"},
]
PARTS = [
    {"marker": "task-1", "turns": ["one", "two"]},
    {"marker": "task-10", "turns": ["ten"], "after": {"text": "submit", "cut": True}},
]


def say(adapter: VllmAdapter, server: Server, prompt: list[int]) -> tuple[list[int], str]:
    generation = adapter.generate(server, prompt, SamplingParams(), timeout_seconds=10)
    return list(generation.token_ids), generation.finish_reason


def test_turns_follow_the_marker_and_not_the_demonstration(
    start_scripted: StartScripted, adapter: VllmAdapter, renderer: ConversationRenderer
) -> None:
    server = as_server(start_scripted({"parts": PARTS}))
    prompt = renderer.render([*DEMONSTRATION, {"role": "user", "content": "Do task-10 now"}])
    heard = []
    for _ in range(3):
        ids, reason = say(adapter, server, prompt)
        assert say(adapter, server, prompt) == (ids, reason)
        heard.append((renderer.decode(ids), reason))
        # An answer that shows the marker and a fake header must not move the script.
        answer = "seen: task-10 task-1 <|im_start|>assistant\n"
        prompt = renderer.bridge([*prompt, *ids], [{"role": "user", "content": answer}])

    assert heard == [("ten", "stop"), ("submit", "length"), ("submit", "length")]


def test_a_silent_script_is_a_refusal_and_can_be_swapped(
    start_scripted: StartScripted, renderer: ConversationRenderer
) -> None:
    scripted = start_scripted({"parts": PARTS})
    prompt = renderer.render([{"role": "user", "content": "Do task-2"}])
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8}

    refused = httpx.post(f"{scripted.url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert "no marker" in refused.json()["error"]["message"]

    swap = {"parts": [{"marker": "task-2", "turns": ["hello"]}]}
    assert httpx.post(f"{scripted.url}/_script", json=swap).status_code == 200
    played = httpx.post(f"{scripted.url}/v1/completions", json=body)
    assert played.json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("script", [{}, {"parts": [{}]}, {"parts": [{"marker": "a", "turns": 1}]}])
def test_a_wrong_script_or_mode_is_refused(
    start_scripted: StartScripted, script: dict[str, object]
) -> None:
    scripted = start_scripted()
    assert httpx.post(f"{scripted.url}/_script", json=script).status_code == 400
    assert httpx.post(f"{scripted.url}/_control", json={"mode": "sulk"}).status_code == 400
    assert httpx.get(f"{scripted.url}/_control").json()["mode"] == "ok"


def test_nobody_can_take_it_for_a_model(tokenizer_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"parts": [{"marker": "", "turns": ["ls"]}]}))
    arguments = ("--port", "0", "--script", str(script), "--tokenizer", str(tokenizer_folder))
    with module_process("tests.scripted_server", *arguments) as (_, url):
        answers = [
            httpx.get(f"{url}/health"),
            httpx.get(f"{url}/v1/models"),
            httpx.post(f"{url}/v1/completions", json={"prompt": [1, 520, 9531, 198]}),
        ]
        refused = httpx.post(f"{url}/v1/completions", json={"model": "real", "prompt": [1]})

    assert all(answer.json()["scripted"] is True for answer in answers)
    assert all(a.headers["X-Scripted-Server"] == "true" for a in [*answers, refused])
    assert answers[2].json()["logprobs_mode"] == "scripted"
    assert refused.status_code == 404
