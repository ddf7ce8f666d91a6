"""The reference system's surface on the real line, driven as its trainers drive it."""

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]
TOKENS = {
    "model": "hosted_vllm/Qwen/Qwen3-4B",
    "api_key": "dummy_key",
    "temperature": 1.0,
    "top_p": 1.0,
    "max_iterations": 8,
    "max_output_tokens": 1536,
    "token_level_generation": True,
    "max_model_len": 32768,
}


@pytest.fixture
def surface(line: Line, tmp_path: Path) -> Iterator[httpx.Client]:
    """Serve the surface to this machine without a token; nobody else's settings change."""
    policy = line.trainer.call("GET", f"/policies/{line.policy}/")
    body = {name: policy[name] for name in ("model", "tokenizer", "context_tokens")}
    line.trainer.call("POST", "/policies/", {**body, "name": "surface"})
    path = tmp_path / "surface.json"
    path.write_text(
        json.dumps(
            {
                "policy": "surface",
                "timeout_seconds": 120,
                "account": "e2e",
                "data_sources": {
                    "swe": {"task_set": "surface"},
                    "inline": {
                        "environment": "terminal",
                        "hidden": {"tests": {"test.sh": {"base64": "$.test", "mode": 0o755}}},
                        "resolved_above": 0.5,
                    },
                },
            }
        )
    )
    processes = line.stack.started()
    processes.stop("web")
    processes.start("web", PRORL_REFERENCE_SURFACE=str(path))
    try:
        line.stack.wait_ready()
        with httpx.Client(base_url=line.stack.url, timeout=150) as client:
            yield client
    finally:
        processes.stop("web")
        line.stack.start("web")
        line.stack.wait_ready()


def trained_on(messages: list[JSON]) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return prompt, response, mask and log-probabilities as the reference's trainer joins them."""
    first = next(i for i, each in enumerate(messages) if each["role"] == "assistant")
    prompt = [token for each in messages[:first] for token in each["token_ids"]]
    response, mask, logprobs = [], [], []
    for each in messages[first:]:
        response += each["token_ids"]
        mask += [int(each["role"] == "assistant")] * len(each["token_ids"])
        logprobs += each["logprobs"] or [0.0] * len(each["token_ids"])
    return prompt, response, mask, logprobs


def test_a_trainer_of_the_reference_trains_on_exactly_what_was_sampled(
    line: Line, import_folder: ImportFolder, tmp_path: Path, surface: httpx.Client
) -> None:
    # Given a task set, and a server that is registered and started as the trainers do it.
    ref = write_task(tmp_path / "tasks", "surface")
    import_folder("surface", tmp_path / "tasks")
    turns = ["echo hello | tee x", "cat x", "submit"]
    line.server.play({"marker": marker("surface"), "turns": turns})
    assert surface.post("/clear_llm_server").status_code == 200
    assert surface.post("/add_llm_server", json={"address": line.server.url}).status_code == 200
    assert surface.post("/start").json() == {"status": "Server started successfully"}

    # When two samples of a task and one task of the request's own are processed.
    def process(instance: JSON) -> JSON:
        body = {"instance": instance, "sampling_params": TOKENS}
        answer = surface.post("/process", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    own = {
        "data_source": "inline",
        "instance_id": "own",
        "instruction": marker("surface"),
        "test": base64.b64encode(b"#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n").decode(),
    }
    instances = [
        *({"data_source": "swe", "instance_id": ref, "trajectory_id": n} for n in range(2)),
        {**own, "trajectory_id": 0},
    ]
    others = {each["id"] for each in line.trainer.all_pages("/rollouts/?page_size=500")}
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(process, each) for each in instances]
        wait_until(
            lambda: surface.get("/status").json()["jobs"] or all(w.done() for w in waiting),
            "the jobs in the status",
        )
        results = [each.result() for each in waiting]
    assert surface.post("/stop").json() == {"status": "Server stopped successfully"}

    # Then each result is the rollout's own, token by token.
    assert [r["error"] for r in results] == [None] * 3
    assert [r["instance_id"] for r in results] == [ref, ref, "own"]
    assert [r["resolved"] for r in results] == [True, True, False]
    assert [(r["success"], r["finish"], r["filter"]) for r in results] == [(True, True, False)] * 3
    by_tokens = {}
    for rollout in line.trainer.all_pages("/rollouts/?page_size=500&state=done"):
        if rollout["id"] not in others and rollout["environment"].startswith("terminal@"):
            (segment,) = line.trajectory(rollout["id"])["segments"]
            by_tokens[tuple(segment["response_ids"])] = segment
    for result in results:
        prompt, response, mask, logprobs = trained_on(result["messages"])
        segment = by_tokens[tuple(response)]
        assert prompt == segment["prompt_ids"]
        assert mask == segment["response_mask"]
        assert logprobs == segment["response_logprobs"]
        assert sum(each["role"] == "assistant" for each in result["messages"]) == 3
        assert result["timing"]["run_time"] > 0
        assert result["report"]["reward"] == (1.0 if result["resolved"] else 0.0)
    assert surface.get("/status").status_code == 503
