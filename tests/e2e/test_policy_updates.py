"""A policy's weights are really exchanged in the middle of a rollout."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.tiny_server.weights import load_weights
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from tests.e2e.harness import JSON, Line, wait_until

TENSOR = "output_norm.weight"
CACHE = ROOT / "var" / "cache" / "tiny"


class RealServer:
    """The CPU server in a process of its own, whose weights may be exchanged."""

    def __init__(self, weights: Path, cache: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.weights = weights
        arguments = ["--port", self.url.rpartition(":")[2], "--cache-dir", str(cache), "--control"]
        arguments += ["--weights-dir", str(weights), "--weight-version", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.tiny_server", *arguments],
            cwd=ROOT,
            # Threads that wait for each other take a hundred times as long on a machine at work.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def load(self, version: int) -> None:
        """Exchange the weights, as a trainer does while no generation is under way."""
        info = {"path": "next.npz", "weight_version": str(version)}
        answer = httpx.post(f"{self.url}/update_weights", json={"update_info": info}, timeout=60)
        answer.raise_for_status()

    def hold(self) -> None:
        """Keep every request where it is, so that none ends while a test gets on slowly."""
        path = f"{self.url}/pause?mode=keep&clear_cache=false"
        httpx.post(path, timeout=60).raise_for_status()

    def go_on(self) -> None:
        """Go on with every request."""
        httpx.post(f"{self.url}/resume", timeout=60).raise_for_status()

    def is_paused(self) -> bool:
        return bool(httpx.get(f"{self.url}/is_paused", timeout=60).json()["is_paused"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Start the server with version 1; the file of the next version is beside it."""
    folder = tmp_path_factory.mktemp("weights")
    # Reading the model's file anew takes a minute of a loaded machine.
    cache = CACHE if CACHE.is_dir() else tmp_path_factory.mktemp("model-cache")
    norm = load_weights(cache).output_norm
    with (folder / "next.npz").open("wb") as file:
        np.savez(file, **{TENSOR: norm * np.float32(0.97)})
    running = RealServer(folder, cache)
    try:
        wait_until(running.healthy, "the CPU server", 120)
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@pytest.fixture
def policy(line: Line, server: RealServer, tokenizer_folder: Path) -> str:
    """Return a policy at the version that the server serves."""
    server.go_on()
    served = int(httpx.get(f"{server.url}/weight_info").json()["weight_version"])
    body = {
        "name": f"real-{next(_numbers)}",
        "model": server.model(),
        "tokenizer": str(tokenizer_folder),
        "context_tokens": 2048,
        "version": served,
    }
    policy = line.trainer.call("POST", "/policies/", body)["id"]
    added = {"policy": policy, "url": server.url, "kind": "vllm", "max_in_flight": 4}
    line.trainer.call("POST", "/inference-servers/", added)
    return str(policy)


_numbers = itertools.count()


def start(line: Line, policy: str, **values: Any) -> str:
    """Start a rollout that samples one long turn; return its id once it generates."""
    experiment = line.experiment(
        policy=policy,
        sampling={"max_tokens": 24, "temperature": 1.5, "seed": 7},
        budgets={"inference_wait_seconds": 120, "run_seconds": 300},
        **values,
    )
    task = {
        "environment": "arithmetic",
        "instruction": "Write a long story about numbers.",
        "hidden": {"evaluator_payload": {"answer": "7"}},
    }
    body = {"groups": [{"inline": task, "samples": 1}]}
    answer = line.trainer.call("POST", f"/experiments/{experiment}/groups/", body)
    (rollout,) = answer["groups"][0]["rollouts"]
    line.wait_running(rollout, "run")
    return str(rollout)


def begin(line: Line, policy: str, mode: str, **more: Any) -> str:
    """Begin an update to the next version; return its path."""
    version = line.trainer.call("GET", f"/policies/{policy}/")["version"] + 1
    path = f"/policies/{policy}/updates/"
    body = {"version": version, "mode": mode, **more}
    return f"{path}{line.trainer.call('POST', path, body)['number']}/"


def wait_ready(line: Line, path: str) -> JSON:
    """Wait until an update is ready for new weights; return it."""

    def ready() -> JSON | None:
        found = line.trainer.call("GET", path)
        return found if found["state"] == "ready" else None

    return dict(wait_until(ready, "a ready update", 90))


def exchange(line: Line, path: str, server: RealServer) -> JSON:
    """Give the server its weights once the update is ready; return the update completed."""
    found = wait_ready(line, path)
    server.load(found["to_version"])
    return dict(line.trainer.call("POST", f"{path}complete/", {}))


def hold_while_sampling(server: RealServer) -> None:
    """Hold a running request at a moment when it has at least one token."""

    def running() -> bool:
        return int(httpx.get(f"{server.url}/health", timeout=5).json()["running"]) > 0

    wait_until(running, "a running request")
    # Requests advance together, the older first: this one's token comes after one of the other's.
    body = {"model": server.model(), "prompt": [1, 2, 3], "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    server.hold()


def runs_of(line: Line, rollout: str) -> tuple[JSON, list[list[int]]]:
    """Return the one segment of a rollout and its versions' run lengths, proven to add up."""
    trajectory = line.trajectory(rollout)
    (segment,) = trajectory["segments"]
    runs = segment["policy_versions"]
    assert sum(run for _, run in runs) == len(segment["response_ids"])
    assert len(segment["response_logprobs"]) == len(segment["response_ids"])
    assert trajectory["policy_version"] == {"first": runs[0][0], "last": runs[-1][0]}
    return segment, runs


@pytest.mark.parametrize("control", [False, True], ids=["by-the-trainer", "by-the-service"])
def test_one_turn_of_two_versions(
    line: Line, server: RealServer, policy: str, control: bool
) -> None:
    old = int(line.trainer.call("GET", f"/policies/{policy}/")["version"])
    rollout = start(line, policy)
    hold_while_sampling(server)

    path = begin(line, policy, "abort", control=control)
    if not control:
        wait_ready(line, path)  # a server that went on before might be done first
        server.go_on()
    done = exchange(line, path, server)

    assert (done["state"], done["to_version"]) == ("completed", old + 1)
    assert [each["said"] for each in done["servers"]] == [f"says version {old + 1}"]
    assert (done["paused_at"] is not None) is control
    (ended,) = line.wait_done([rollout], 240)
    assert not server.is_paused()
    assert (ended["outcome"], ended["turns"]) == ("scored", 1)
    segment, runs = runs_of(line, rollout)
    assert [version for version, _ in runs] == [old, old + 1]
    assert len(segment["turns"]) == 1


def test_drained_calls_are_of_one_version(line: Line, server: RealServer, policy: str) -> None:
    old = int(line.trainer.call("GET", f"/policies/{policy}/")["version"])
    first = start(line, policy)
    hold_while_sampling(server)

    path = begin(line, policy, "drain-calls")
    server.go_on()
    assert exchange(line, path, server)["state"] == "completed"

    second = start(line, policy)
    line.wait_done([first, second], 300)
    assert [version for version, _ in runs_of(line, first)[1]] == [old]
    assert [version for version, _ in runs_of(line, second)[1]] == [old + 1]


def test_a_worker_that_dies_while_generating_holds_up_an_update_for_a_lease(
    line: Line, server: RealServer, policy: str
) -> None:
    old = int(line.trainer.call("GET", f"/policies/{policy}/")["version"])
    rollout = start(line, policy)
    hold_while_sampling(server)
    path = begin(line, policy, "drain-calls")
    assert line.trainer.call("GET", path)["state"] == "quiescing"

    line.stack.started().kill("run")
    line.ensure_up()
    done = exchange(line, path, server)
    server.go_on()

    assert done["state"] == "completed"
    (ended,) = line.wait_done([rollout], 240)
    assert ended["outcome"] == "scored", line.attempts(rollout)
    assert [version for version, _ in runs_of(line, rollout)[1]] == [old + 1]
    assert [each["state"] for each in line.attempts(rollout) if each["stage"] == "run"] == [
        "lost",
        "finished",
    ]


def test_a_server_with_other_weights_is_refused(
    line: Line, server: RealServer, policy: str
) -> None:
    old = int(line.trainer.call("GET", f"/policies/{policy}/")["version"])
    path = f"/policies/{policy}/updates/"
    body = {"version": old + 1, "mode": "none"}
    number = line.trainer.call("POST", path, body)["number"]

    refused = httpx.post(
        f"{line.stack.url}/api/v1{path}{number}/complete/",
        headers={"Authorization": f"Bearer {line.trainer.token}"},
        json={},
    )

    assert (refused.status_code, refused.json()["code"]) == (409, "policy.version_mismatch")
    assert f"{server.url} says version {old}" in refused.json()["detail"]
    assert line.trainer.call("POST", f"{path}{number}/abandon/", {})["state"] == "abandoned"
