"""A whole stack with one run worker, a slow server, and rollouts that wait for it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg

from benchmarks.rollouts.slow_server import MODEL
from examples.demo.trainer import Trainer
from examples.tiny_server.tokenizer import export_tokenizer
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from prorl_site.stack.stack import Stack, StackError

JSON = dict[str, Any]
ENVIRONMENT = "many"
SERVER = "slow-server"


@dataclass
class Line:
    """The running stack; `experiment` is the one that everything is submitted to."""

    stack: Stack
    trainer: Trainer
    server: str
    experiment: str

    def sql(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query against the stack's database."""
        assert self.stack.engines is not None
        url = self.stack.engines.database_url(self.stack.database)
        with psycopg.connect(url, autocommit=True) as connection:
            return connection.execute(query.encode(), values).fetchall()

    def control(self, **asked: float) -> JSON:
        """Tell the slow server how to behave; return its state."""
        answer = httpx.post(f"{self.server}/_control", json=asked, timeout=30)
        return dict(answer.raise_for_status().json())

    def state(self) -> JSON:
        """Return the slow server's state."""
        return dict(httpx.get(f"{self.server}/_state", timeout=30).raise_for_status().json())

    def submit(self, count: int) -> list[str]:
        """Submit so many rollouts, each of a task of its own; return their ids."""
        tasks = [
            {
                "environment": ENVIRONMENT,
                "instruction": f"Task {number}.",
                "hidden": {"evaluator_payload": {"answer": "7"}},
            }
            for number in range(count)
        ]
        body = {"groups": [{"inline": task, "samples": 1} for task in tasks]}
        answer = self.trainer.call("POST", f"/experiments/{self.experiment}/groups/", body)
        return [each for group in answer["groups"] for each in group["rollouts"]]

    def done(self, rollouts: Sequence[str]) -> int:
        """Return how many of some rollouts are done."""
        query = "SELECT count(*) FROM rollouts_rollout WHERE id = ANY(%s) AND state = 'done'"
        return int(self.sql(query, list(rollouts))[0][0])

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 180.0) -> None:
        """Wait for a condition. Raises StackError, also when a process of the stack ended."""
        self.stack.wait_for(condition, what, seconds)

    def wait_done(self, rollouts: Sequence[str], seconds: float = 180.0) -> None:
        """Wait until rollouts are done. Raises StackError that says where they are instead."""
        with self.telling(rollouts):
            self.wait(
                lambda: self.done(rollouts) == len(rollouts), "the end of all rollouts", seconds
            )

    @contextmanager
    def telling(self, rollouts: Sequence[str]) -> Iterator[None]:
        """Add to a StackError from inside where these rollouts are."""
        try:
            yield
        except StackError as late:
            raise StackError(f"{late}\n{self.whereabouts(rollouts)}") from late

    def whereabouts(self, rollouts: Sequence[str]) -> str:
        """Say how many rollouts are where, what their attempts met, and what the server holds."""
        states = self.sql(
            "SELECT state, outcome, failure_code, turns, count(*) FROM rollouts_rollout "
            "WHERE id = ANY(%s) GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC",
            list(rollouts),
        )
        attempts = self.sql(
            "SELECT stage, state, failure_code, min(failure_detail), count(*) "
            "FROM rollouts_attempt WHERE rollout_id = ANY(%s) GROUP BY 1, 2, 3 ORDER BY 1, 5 DESC",
            list(rollouts),
        )
        servers = self.sql("SELECT state, healthy, detail FROM rollouts_inferenceserver")
        lines = [
            *(
                f"{n} rollouts: {state}, {outcome}, {code!r}, after {turns} turns"
                for state, outcome, code, turns, n in states
            ),
            *(
                f"{n} attempts: {stage} {state}, {code!r} {detail}"
                for stage, state, code, detail, n in attempts
            ),
            f"servers as last checked: {servers}",
            f"the slow server: {self.state()}",
            f"the run worker: {self.stack.started().log_tail('run')}",
        ]
        return "\n".join(lines)

    def wait_held(self, count: int) -> None:
        """Wait until the server holds so many requests."""
        self.wait(lambda: self.state()["held"] >= count, f"{count} requests that wait")


@contextmanager
def open_line(
    *,
    rollouts: int,
    runtime: str,
    turns: int,
    tokens: int = 64,
    latency: float = 2.0,
    events: int = 8,
    image_root: Path | None = None,
    **settings: str,
) -> Iterator[Line]:
    """Yield a stack that may run so many rollouts at once; nothing of it is left after."""
    var = Path(tempfile.mkdtemp(prefix="prorl-many-"))
    var.chmod(0o755)
    sizes = {
        "PRORL_RUNTIME": runtime,
        "PRORL_NODE_CAPACITY": str(rollouts),
        "PRORL_RUN_WORKERS": str(rollouts),
        "PRORL_IMAGE_ROOT": str(image_root or ROOT / "var" / "images"),
    }
    stack = Stack(var, settings={**sizes, **settings}, database="many")
    port = free_port()
    numbers = {"port": port, "turns": turns, "tokens": tokens, "events": events, "latency": latency}
    words = " ".join(f"--{name} {value}" for name, value in numbers.items())
    try:
        folder = export_tokenizer(var / "tokenizer")
        stack.prepare()
        module = "benchmarks.rollouts.slow_server"
        stack.start_other(SERVER, f"{sys.executable} -m {module} {words} --tokenizer {folder}")
        stack.start()
        stack.manage("seed_catalogue")
        scopes = ("--scopes", "read", "submit", "policy", "operate")
        stack.manage("create_operator", "many", "--password", "a-password-of-many-1")
        token = stack.manage("create_trainer", "many", "--quiet", *scopes).strip()
        stack.wait_ready()
        trainer = Trainer(stack.url, token)
        line = Line(stack, trainer, f"http://127.0.0.1:{port}", "")
        line.experiment = _catalogue(line, folder, rollouts, turns)
        try:
            yield line
        finally:
            trainer.close()
    finally:
        stack.stop()
        shutil.rmtree(var, ignore_errors=True)


def _catalogue(line: Line, tokenizer: Path, rollouts: int, turns: int) -> str:
    """Make the policy, its server, the environment and the experiment; return the last one's id."""
    call = line.trainer.call
    policy = {
        "name": "slow",
        "model": MODEL,
        "tokenizer": str(tokenizer),
        "context_tokens": 32768,
    }
    policy_id = call("POST", "/policies/", policy)["id"]
    server = {"policy": policy_id, "url": line.server, "kind": "vllm", "max_in_flight": rollouts}
    call("POST", "/inference-servers/", server)
    environment = {
        "name": ENVIRONMENT,
        "image": "base",
        "agent": "command_line",
        "tools": ["bash", "submit"],
        "system_prompt": "You work in a Linux shell. Answer with one line.",
        "evaluator": "exact",
    }
    call("POST", "/environments/", environment)
    experiment = {
        "name": "many",
        "policy": policy_id,
        "task_sets": [],
        "budgets": {"max_turns": turns + 1, "inference_wait_seconds": 300},
    }
    return str(call("POST", "/experiments/", experiment)["id"])
