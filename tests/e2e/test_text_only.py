"""A policy that gives text alone, through the whole line: scored, and nothing to train on."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from examples.tiny_server.server import MODEL_NAME
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from tests.e2e.harness import Line, wait_until, write_task

CACHE = ROOT / "var" / "cache" / "tiny"
ImportFolder = Callable[..., None]


@pytest.fixture(scope="module")
def chatting(whole_line: Line) -> Iterator[tuple[str, str]]:
    """Yield a text-only policy and the address of its server, the real model's."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ["--port", str(port), "--cache-dir", str(CACHE), "--control"]
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.tiny_server", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def healthy() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(healthy, "the model server", 120)
        body = {"name": "chatting", "model": MODEL_NAME, "tokenizer": "", "context_tokens": 2048}
        policy = whole_line.trainer.call("POST", "/policies/", body)["id"]
        server = {"policy": policy, "url": url, "kind": "openai", "max_in_flight": 4}
        whole_line.trainer.call("POST", "/inference-servers/", server)
        yield policy, url
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture
def paused(chatting: tuple[str, str]) -> Iterator[None]:
    """Let the server take requests and answer none of them during a test."""
    _policy, url = chatting
    httpx.post(f"{url}/pause?mode=keep", timeout=30).raise_for_status()
    yield
    httpx.post(f"{url}/resume", timeout=30).raise_for_status()


def test_an_episode_is_scored_and_has_nothing_to_train_on(
    line: Line, chatting: tuple[str, str], import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "said", instruction="Say hello.")
    # No demonstrations: every token of a prompt costs the small model's one core.
    body = {"name": "plain", "image": "base", "tools": ["bash", "submit"]}
    line.operator.call("POST", "/environments/", body)
    import_folder("said", tmp_path, "plain")
    experiment = line.experiment(
        "said",
        policy=chatting[0],
        sampling={"temperature": 0.0, "max_tokens": 5},
        budgets={"max_turns": 2, "max_sampled_tokens": 8},
    )

    (rollout,) = line.wait_done(line.submit(experiment, [ref]), seconds=240)

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0), rollout
    assert rollout["stop_reason"] in ("max_turns", "max_tokens")
    assert 1 <= rollout["turns"] <= 2
    assert 1 <= rollout["sampled_tokens"] <= 8
    trajectory = line.trajectory(rollout["id"])
    assert (trajectory["segments"], trajectory["trainable"]) == ([], False)
    said = [m for m in trajectory["messages"] if m["role"] == "assistant"][-rollout["turns"] :]
    assert all(message["content"] for message in said)


def test_the_agents_time_ends_a_request_that_is_under_way(
    line: Line, chatting: tuple[str, str], paused: None, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "late")
    import_folder("late", tmp_path)
    experiment = line.experiment("late", policy=chatting[0], budgets={"run_seconds": 2})

    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["stop_reason"]) == ("scored", "agent_timeout"), rollout
    assert (rollout["turns"], rollout["sampled_tokens"]) == (0, 0)
    wait_until(lambda: under_way(chatting[1]) == 0, "the end of the request")


def test_a_cancelled_rollout_leaves_its_request(
    line: Line, chatting: tuple[str, str], paused: None, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "stopped")
    import_folder("stopped", tmp_path)
    (rollout,) = line.submit(line.experiment("stopped", policy=chatting[0]), [ref])
    wait_until(lambda: under_way(chatting[1]) == 1, "the request")

    line.trainer.call("POST", f"/rollouts/{rollout}/cancel/")

    (ended,) = line.wait_done([rollout])
    assert ended["outcome"] == "cancelled"
    wait_until(lambda: under_way(chatting[1]) == 0, "the end of the request")
    wait_until(lambda: line.sandboxes_left([rollout]) == 0, "the sandbox's end")


def under_way(url: str) -> int:
    """Return how many requests the server holds."""
    state = httpx.get(f"{url}/health", timeout=10).json()
    return int(state["running"] + state["waiting"])
