"""The whole stack as real processes, driven from outside: over HTTP, by signals, by SQL."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from examples.demo.trainer import Trainer
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT, STAGES
from prorl_site.stack.stack import Stack

JSON = dict[str, Any]
SUBMIT = {"parts": [{"marker": "", "turns": ["submit"], "after": "submit"}]}
TIMINGS = {
    "PRORL_LEASE_SECONDS": "5",
    "PRORL_HEARTBEAT_SECONDS": "1",
    "PRORL_CANCEL_POLL_SECONDS": "0.3",
    "PRORL_REAPER_SECONDS": "1",
    "PRORL_REPUBLISH_SECONDS": "3",
    "PRORL_DISPATCH_SECONDS": "0.5",
    "PRORL_RETRY_DELAY_SECONDS": "0.2",
    "PRORL_SERVER_CHECK_SECONDS": "2",
    "PRORL_POLICY_CONTROL": "1",
    "PRORL_POLICY_GATE_LEASE_SECONDS": "5",
    "PRORL_NODE_CAPACITY": "16",
    "PRORL_EGRESS": "1",
    "PRORL_INIT_WORKERS": "4",
    "PRORL_RUN_WORKERS": "16",
    "PRORL_EVAL_WORKERS": "2",
    "PRORL_SECRET_E2E": "hidden-from-all-rows",
}


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Return the first true answer of a condition; fail with what it waited for."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.1)


@dataclass
class ModelServer:
    """A scripted inference server in a process of its own."""

    tokenizer: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it with the script that submits at once."""
        script = self.tokenizer.parent / f"script-{self.port}.json"
        script.write_text(json.dumps(SUBMIT))
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.scripted_server",
                "--port",
                str(self.port),
                "--script",
                str(script),
                "--tokenizer",
                str(self.tokenizer),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._healthy, "the scripted server")

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).json()["scripted"] is True
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """End it at once; idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def play(self, *parts: JSON) -> None:
        """Play other texts from now on; what no part fits submits at once."""
        script = {"parts": [*parts, *SUBMIT["parts"]]}
        httpx.post(f"{self.url}/_script", json=script).raise_for_status()

    def control(self, mode: str = "ok", *, count: int | None = None, delay: float = 0.0) -> None:
        """Misbehave, or behave again."""
        body = {"mode": mode, "count": count, "delay_seconds": delay}
        httpx.post(f"{self.url}/_control", json=body).raise_for_status()

    def state(self) -> JSON:
        """Return the mode, and how many requests came, were answered and are under way."""
        return dict(httpx.get(f"{self.url}/_control").raise_for_status().json())


@dataclass
class Line:
    """A running stack, its trainer and its scripted server."""

    stack: Stack
    server: ModelServer
    trainer: Trainer
    operator: Trainer
    policy: str

    def ensure_up(self) -> None:
        """Start what a test ended, and wait until everything is there."""
        processes = self.stack.started()
        for name in STAGES:
            if name not in processes.running or processes.running[name].poll() is not None:
                self.stack.start(name)
        if self.server.process is None:
            self.server.start()
        self.server.control()
        self.server.play()
        self.stack.wait_ready()

    def sql(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query against the stack's database."""
        assert self.stack.engines is not None
        url = self.stack.engines.database_url(self.stack.database)
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def experiment(self, *task_sets: str, **values: Any) -> str:
        """Create an experiment over task sets; return its id."""
        body = {
            "name": "e2e",
            "policy": self.policy,
            "task_sets": list(task_sets),
            "sampling": {"max_tokens": 4096},
            "budgets": {"max_turns": 8, "tool_seconds": 60, "inference_wait_seconds": 30},
            **values,
        }
        return str(self.trainer.call("POST", "/experiments/", body)["id"])

    def submit(self, experiment: str, refs: Iterable[str], samples: int = 1) -> list[str]:
        """Submit a group for each task; return the rollouts' ids."""
        groups = [{"task_ref": ref, "samples": samples} for ref in refs]
        answer = self.trainer.call("POST", f"/experiments/{experiment}/groups/", {"groups": groups})
        return [rollout for group in answer["groups"] for rollout in group["rollouts"]]

    def rollout(self, rollout_id: str) -> JSON:
        """Return one rollout as the API shows it."""
        return dict(self.trainer.call("GET", f"/rollouts/{rollout_id}/"))

    def attempts(self, rollout_id: str) -> list[JSON]:
        """Return the attempts of a rollout in the order of their start."""
        return list(self.trainer.call("GET", f"/rollouts/{rollout_id}/attempts/"))

    def trajectory(self, rollout_id: str) -> JSON:
        """Return the trajectory of a rollout."""
        return dict(self.trainer.call("GET", f"/rollouts/{rollout_id}/trajectory/"))

    def wait_done(self, rollouts: Sequence[str], seconds: float = 90.0) -> list[JSON]:
        """Return the rollouts once all are done."""

        def all_done() -> bool:
            ended = self.sql(
                "SELECT count(*) FROM rollouts_rollout WHERE id = ANY(%s) AND state = 'done'",
                list(rollouts),
            )
            return bool(ended[0][0] == len(rollouts))

        try:
            wait_until(all_done, "the end of all rollouts", seconds)
        except AssertionError as error:
            found = [self.rollout(each) for each in rollouts]
            stuck = [
                (r["id"], r["state"], self.attempts(r["id"])) for r in found if not r["outcome"]
            ]
            raise AssertionError(f"{error}: {stuck[:2]}") from None
        return [self.rollout(each) for each in rollouts]

    def wait_running(self, rollout_id: str, stage: str, seconds: float = 60.0) -> JSON:
        """Return the attempt at a stage once a worker carries it out."""

        def running() -> JSON | None:
            found = [a for a in self.attempts(rollout_id) if a["stage"] == stage]
            return next((a for a in found if a["state"] == "running"), None)

        found: JSON = wait_until(running, f"a running {stage} attempt", seconds)
        return found

    def sandboxes_left(self, rollouts: Sequence[str]) -> int:
        """Return how many sandboxes of rollouts are not gone."""
        rows = self.sql(
            "SELECT count(*) FROM sandboxes_sandbox WHERE owner = ANY(%s) AND state <> 'gone'",
            list(rollouts),
        )
        return int(rows[0][0])


def write_task(
    folder: Path,
    name: str,
    *,
    test: str = "echo 1 > /logs/verifier/reward.txt",
    setup: str = "",
    instruction: str = "",
    evaluator: str = "",
) -> str:
    """Write a Harbor task folder; return the reference that it is imported under.

    `evaluator` are settings of the evaluator, as lines of TOML.
    """
    task = folder / name
    for each in ("tests", "environment"):
        (task / each).mkdir(parents=True, exist_ok=True)
    (task / "task.toml").write_text(
        f'schema_version = "1.4"\n[task]\nname = "e2e/{name}"\n[verifier]\ntimeout_sec = 60.0\n'
        f"[metadata.evaluator]\n{evaluator}\n"
    )
    (task / "instruction.md").write_text(instruction or f"Marker {name} end.")
    (task / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    if setup:
        (task / "environment" / "setup.sh").write_text(f"#!/bin/bash\nset -e\n{setup}\n")
    return f"e2e/{name}"


WHOLE = 'scope = "whole"'  # for tests that look outside of the working directory


def marker(name: str) -> str:
    """Return the text in a task's instruction that the scripted server looks for."""
    return f"Marker {name} end."
