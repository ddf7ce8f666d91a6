"""Run the demo: `python -m examples.demo` (through `make demo`, which sets everything up)."""

import argparse
import json
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from rich.console import Console

from examples.demo.trainer import JSON, ServiceRefused, Trainer
from examples.demo.view import batch_table, follow, readable
from examples.tiny_server.tokenizer import export_tokenizer
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from prorl_site.stack.stack import Stack, StackError

MODEL = "smollm2-135m-instruct"
SAMPLES = 4
CAPACITY = 16
TASKS = {
    "demo": ["demo/make-file", "demo/make-folder", "demo/copy-file", "demo/delete-file"],
    "arithmetic": ["arithmetic/add-2-2", "arithmetic/add-2-1"],
}
LIMIT_SECONDS = 600.0
EXIT_CODE = re.compile(r"^\[exit code: \d+\]$", re.MULTILINE)


class DemoFailed(Exception):
    """The demo did not show what it promises; the message says what is missing."""


class Demo:
    """One run of the demo over one stack."""

    def __init__(self, var_dir: Path, runtime: str, console: Console) -> None:
        self.console = console
        self.runtime = runtime
        self.folder = var_dir / "demo"
        self.stack = Stack(
            var_dir,
            settings={
                "PRORL_RUNTIME": runtime,
                "PRORL_NODE_CAPACITY": str(CAPACITY),
                "PRORL_INIT_WORKERS": "4",
                "PRORL_RUN_WORKERS": "32",
                "PRORL_EVAL_WORKERS": "2",
                "PRORL_DISPATCH_SECONDS": "0.5",
            },
            port=_port(8000),
        )
        self.model_port = free_port()
        self.began = time.monotonic()

    def up(self) -> Trainer:
        """Start everything; return the trainer with its token."""
        with self.console.status("starting PostgreSQL and Valkey, migrating"):
            self.stack.prepare()
        self.stack.start_other(
            "model",
            f"{sys.executable} -m examples.tiny_server --host 127.0.0.1 "
            f"--port {self.model_port} --cache-dir {self.stack.var_dir / 'cache' / 'tiny'}",
        )
        self.stack.start()
        self.console.print(
            f"model [bold]SmolLM2-135M-Instruct[/] (real weights, numpy) on port {self.model_port}"
        )
        tokenizer = self.stack.var_dir / "cache" / "tokenizer"
        export_tokenizer(tokenizer)
        with self.console.status("operator, trainer, catalogue, tasks"):
            token = self._accounts()
        with self.console.status("waiting for web server, workers and model"):
            self.stack.wait_ready(seconds=180)
            model = f"http://127.0.0.1:{self.model_port}/health"
            self.stack.wait_for(lambda: _answers(model), model, 180)
        return Trainer(self.stack.url, token)

    def _accounts(self) -> str:
        password = secrets.token_urlsafe(12)
        printed = self.stack.python(
            *("-m", "examples.demo.seed", "--password", password, "--capacity", str(CAPACITY))
        )
        token, operator = printed.split()
        self.operator = Trainer(self.stack.url, operator)
        self.console.print(
            f"admin    {self.stack.url}/admin/   user [bold]operator[/]   "
            f"password [bold]{password}[/]\n"
            f"trainer  token [bold]{token}[/]   (shown once)"
        )
        return token

    def run(self, trainer: Trainer) -> JSON:
        """Run the experiment, lease its batch, check and write what it showed."""
        experiment = self._submit(trainer)
        deadline = time.monotonic() + LIMIT_SECONDS

        def check() -> None:
            self.stack.wait_for(lambda: True, "the stack", 1)
            if time.monotonic() > deadline:
                raise DemoFailed(f"the rollouts took more than {LIMIT_SECONDS:g} s")

        rate = follow(self.console, lambda: trainer.all_rollouts(experiment), check)
        batch = trainer.call(
            "POST",
            f"/experiments/{experiment}/batches/",
            {"groups": sum(map(len, TASKS.values())), "wait_seconds": 30},
        )
        trajectories: list[JSON] = batch["trajectories"]
        batch_table(self.console, trajectories)
        trainer.call("POST", f"/batches/{batch['id']}/ack/")
        self.console.print(f"batch {batch['id']} acknowledged")
        summary = self._summary(trainer, experiment, trajectories, rate)
        self._write(summary, trajectories)
        self._judge(summary)
        return summary

    def _submit(self, trainer: Trainer) -> str:
        name = f"demo-{secrets.token_hex(3)}"
        policy = trainer.call(
            "POST",
            "/policies/",
            {
                "name": name,
                "model": MODEL,
                "tokenizer": str(self.stack.var_dir / "cache" / "tokenizer"),
                "context_tokens": 2048,
            },
        )
        trainer.call(
            "POST",
            "/inference-servers/",
            {
                "policy": policy["id"],
                "url": f"http://127.0.0.1:{self.model_port}",
                "kind": "vllm",
                "max_in_flight": 16,
            },
        )
        experiment = trainer.call(
            "POST",
            "/experiments/",
            {
                "name": name,
                "policy": policy["id"],
                "task_sets": list(TASKS),
                "group_size": SAMPLES,
                "sampling": {"temperature": 1.0, "max_tokens": 16},
                "budgets": {"max_turns": 3, "tool_seconds": 10, "run_seconds": 180},
            },
            key=name,
        )
        groups = [{"task_ref": ref} for refs in TASKS.values() for ref in refs]
        trainer.call(
            "POST", f"/experiments/{experiment['id']}/groups/", {"groups": groups}, key=name
        )
        self.console.print(f"experiment {name}: {len(groups)} tasks x {SAMPLES} samples")
        return str(experiment["id"])

    def _summary(
        self, trainer: Trainer, experiment: str, trajectories: list[JSON], rate: float
    ) -> JSON:
        rollouts = trainer.all_rollouts(experiment)
        rewards = [each["reward"] for each in trajectories if each["reward"] is not None]
        return {
            "experiment": experiment,
            "runtime": self.runtime,
            "rollouts": len(rollouts),
            "states": dict(Counter(row["state"] for row in rollouts)),
            "outcomes": dict(Counter(row["outcome"] for row in rollouts)),
            "failures": dict(Counter(r["failure_code"] for r in rollouts if r["failure_code"])),
            "tool_calls": sum(row["tool_calls"] for row in rollouts),
            "rollouts_with_tool_calls": sum(row["tool_calls"] > 0 for row in rollouts),
            "sandboxes_that_ran_a_command": _commands_ran(self.operator, trajectories),
            "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
            "rewards_above_zero": sum(reward > 0 for reward in rewards),
            "sampled_tokens": sum(row["sampled_tokens"] for row in rollouts),
            "sampled_tokens_per_second": round(rate, 1),
            "elapsed_seconds": round(time.monotonic() - self.began, 1),
        }

    def _write(self, summary: JSON, trajectories: list[JSON]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        best = max(
            trajectories, key=lambda each: (each["reward"] or 0, each["turns"], -each["sample"])
        )
        (self.folder / "trajectory.txt").write_text(readable(best))
        self.console.print_json(data=summary)
        self.console.print(f"written: {self.folder}/summary.json, {self.folder}/trajectory.txt")

    def _judge(self, summary: JSON) -> None:
        """Raise DemoFailed unless the demo showed what it promises."""
        if summary["states"] != {"done": summary["rollouts"]}:
            raise DemoFailed(f"not every rollout is done: {summary['states']}")
        if set(summary["outcomes"]) != {"scored"}:
            raise DemoFailed(f"not every rollout was scored: {summary['failures']}")
        if summary["rollouts_with_tool_calls"] == 0:
            raise DemoFailed("the model called no tool at all")
        if summary["sandboxes_that_ran_a_command"] < summary["rollouts_with_tool_calls"]:
            raise DemoFailed("a rollout called a tool and no sandbox of its own ran it")

    def down(self) -> None:
        """End everything; nothing can interrupt it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.stack.stop()

    def keep(self) -> None:
        """Leave the stack up until Ctrl-C."""
        self.console.print(
            f"\nThe stack stays up. Admin: {self.stack.url}/admin/   "
            f"API: {self.stack.url}/api/v1/docs/   model: http://127.0.0.1:{self.model_port}\n"
            f"Settings: {self.stack.var_dir}/stack.env   logs: {self.stack.var_dir}/log\n"
            "Ctrl-C ends it."
        )
        while True:
            self.stack.wait_for(lambda: True, "the stack", 1)
            time.sleep(1)


def _commands_ran(operator: Trainer, trajectories: list[JSON]) -> int:
    """Count the rollouts to which a sandbox of their own gave back a command's exit code.

    The service's rows say which rollout had a started sandbox; the exit code in the conversation
    came through the shell inside it.
    """
    started = {
        row["rollout"]
        for row in operator.all_pages("/sandboxes/?page_size=500")
        if row["purpose"] == "run" and row["ready_at"] is not None
    }
    ran = [
        each
        for each in trajectories
        if each["rollout"] in started
        and any(
            message["role"] == "user" and EXIT_CODE.search(message["content"])
            for message in each["messages"][_prompted(each) :]
        )
    ]
    return len(ran)


def _prompted(trajectory: JSON) -> int:
    """Return how many messages stand before the first sampled one."""
    sampled = sum(len(segment["turns"]) for segment in trajectory["segments"])
    roles = [message["role"] for message in trajectory["messages"]]
    spoken = [place for place, role in enumerate(roles) if role == "assistant"]
    return spoken[-sampled] if sampled else len(roles)


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _port(wanted: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
    return wanted


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; 0 only if every rollout was done and real sandboxes ran the commands."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo")
    parser.add_argument("--var", type=Path, default=ROOT / "var")
    parser.add_argument("--runtime", choices=["apptainer", "local"], default="apptainer")
    parser.add_argument("--keep", action="store_true", help="leave the stack up")
    options = parser.parse_args()
    console = Console(width=min(max(shutil.get_terminal_size((120, 40)).columns, 100), 140))
    # SIGINT too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    if options.runtime == "local":
        console.print(
            "[bold white on red] NOTHING IS ISOLATED [/] RUNTIME=local runs what the model "
            "samples as plain processes of this machine. Never do that with a policy you do "
            "not trust."
        )
    demo = Demo(options.var.resolve(), options.runtime, console)
    status = 1
    try:
        demo.run(demo.up())
        console.print("[bold green]demo passed[/]")
        status = 0
        if options.keep:
            demo.keep()
    except (DemoFailed, ServiceRefused, StackError) as error:
        console.print(f"[bold red]demo failed:[/] {error}", markup=True, highlight=False)
    except KeyboardInterrupt:
        console.print("interrupted: ending every process and sandbox")
        status = 0 if options.keep and status == 0 else 130
    finally:
        demo.down()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
