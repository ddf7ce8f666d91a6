"""Run the training demonstration: `python -m examples.train_demo` (through `make train-demo`)."""

import argparse
import json
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Console

from examples.demo.trainer import ServiceRefused, Trainer
from examples.tiny_server.server import MODEL_NAME
from examples.tiny_server.tokenizer import cached_tokenizer
from examples.tiny_server.weights import gguf_path
from examples.train_demo import boxes
from examples.train_demo.verdict import complaint, summary
from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT
from prorl_site.stack.stack import Stack, StackError

TRAINER = ROOT / ".venv-train" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results"
STEPS = 10
LIMIT_SECONDS = 3600.0
OPERATES = ("--scopes", "read", "operate", "--days", "1")
# The trainer is told of the service's address and its token, and of nothing else.
HIDDEN = ("DATABASE_URL", "BROKER_URL", "PRORL_SECRET_KEY")


class DemoFailed(Exception):
    """The run did not show what it promises; the message says what is missing."""


class TrainDemo:
    """One training run over a stack of its own, in a folder of its own."""

    def __init__(self, var_dir: Path, results: Path, steps: int, console: Console) -> None:
        self.console = console
        self.results = results
        self.steps = steps
        self.cache = var_dir / "cache" / "tiny"
        self.folder = var_dir / "train-demo"
        self.rows = self.folder / "rows.jsonl"
        self.weights = self.folder / "weights"
        self.name = f"train-demo-{secrets.token_hex(3)}"
        self.model = f"http://127.0.0.1:{free_port()}"
        self.stack = Stack(
            self.folder,
            settings={
                "PRORL_IMAGE_ROOT": str(var_dir / "images"),
                "PRORL_NODE_CAPACITY": "16",
                "PRORL_INIT_WORKERS": "4",
                "PRORL_RUN_WORKERS": "32",
                "PRORL_EVAL_WORKERS": "3",
                "PRORL_DISPATCH_SECONDS": "0.5",
            },
        )

    def run(self) -> dict[str, Any]:
        """Bring everything up, train, write and judge the results."""
        with self.console.status("starting PostgreSQL and Valkey, migrating"):
            self.stack.prepare()
            shutil.rmtree(self.weights, ignore_errors=True)
            self.weights.mkdir()
            self.rows.unlink(missing_ok=True)
            token = self._token("trainer")
            password = secrets.token_urlsafe(16)  # nobody logs in; the admin asks for an account
            self.stack.manage("create_operator", "operator", "--password", password)
            operator = self._token("operator", *OPERATES)
        self._start_processes(token)
        with self.console.status("waiting for web server, workers and model"):
            self.stack.wait_ready(seconds=180)
            self.stack.wait_for(lambda: _answers(f"{self.model}/health"), self.model, 180)
        with self.console.status("environment, tasks, policy"):
            self._fill(Trainer(self.stack.url, token), Trainer(self.stack.url, operator))
        self._follow()
        return self._report()

    def _token(self, account: str, *arguments: str) -> str:
        return self.stack.manage("create_trainer", account, "--quiet", *arguments).strip()

    def _start_processes(self, token: str) -> None:
        options = {
            "model": gguf_path(),
            "rows": self.rows,
            "policy": self.name,
            "task-set": boxes.NAME,
            "weights": self.weights,
            "steps": self.steps,
        }
        words = [str(TRAINER), "-m", "examples.train_demo.trainer"]
        words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        without = [word for name in HIDDEN for word in ("-u", name)]
        self.stack.started().start(
            "trainer",
            shlex.join(["env", *without, *words]),
            PRORL_URL=self.stack.url,
            PRORL_TOKEN=token,
            TQDM_DISABLE="1",
        )
        server = {
            "port": self.model.rpartition(":")[2],
            "cache-dir": self.cache,
            "weights-dir": self.weights,
            "weight-version": 0,
        }
        words = [sys.executable, "-m", "examples.tiny_server", "--control"]
        words += [word for name, value in server.items() for word in (f"--{name}", str(value))]
        self.stack.start_other("model", shlex.join(words))
        self.stack.start()

    def _fill(self, trainer: Trainer, operator: Trainer) -> None:
        """Give the service environment, tasks, policy and server; the trainer waits for them."""
        for left in trainer.all_pages("/experiments/?state=active"):
            trainer.call("POST", f"/experiments/{left['id']}/stop/")  # of a run that was killed
        operator.call("POST", "/images/", {"name": "base", "source": "base"})
        operator.call("POST", "/environments/", boxes.environment("base"))
        tasks = boxes.write_tasks(self.folder / "tasks")
        arguments = ["harbor", str(tasks), "--set", boxes.NAME, "--environment", boxes.NAME]
        self.stack.manage("import_tasks", *arguments)
        policy = {
            "name": self.name,
            "model": MODEL_NAME,
            "tokenizer": str(cached_tokenizer(self.cache)),
            "context_tokens": 1024,
        }
        trainer.call("POST", "/policies/", policy)
        server = {"policy": self.name, "url": self.model, "kind": "vllm", "max_in_flight": 16}
        trainer.call("POST", "/inference-servers/", server)
        trainer.close()
        operator.close()

    def _follow(self) -> None:
        """Show the steps until the trainer has ended. Raises DemoFailed, StackError."""
        self.console.print(f"{self.name}: {self.steps} steps, admin at {self.stack.url}/admin/")
        processes = self.stack.started()
        trainer = processes.running["trainer"]
        deadline, shown = time.monotonic() + LIMIT_SECONDS, 0
        while True:
            status = trainer.poll()
            shown += self._show(shown)
            if status is not None:
                break
            for name in processes.dead().keys() - {"trainer"}:
                raise StackError(f"{name} ended:\n{processes.log_tail(name, 40)}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"the training took more than {LIMIT_SECONDS:g} s")
            time.sleep(0.5)
        tail = processes.log_tail("trainer", 15)
        processes.stop("trainer")
        if status != 0:
            raise DemoFailed(f"the trainer ended with {status}:\n{tail}")

    def _show(self, shown: int) -> int:
        """Print the steps that are new; return how many."""
        new = self._read_rows()[shown:]
        for row in new:
            self.console.print(
                f"step {row['step']:>2}  {row['seconds']:>6.0f} s  reward [bold]{row['reward']:.3f}"
                f"[/] (opened {row['opened']:.2f}, said {row['said']:.2f})  lag {row['lag']}  "
                f"log-probabilities within {row['largest_difference']:.1e}"
            )
        return len(new)

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self.rows.is_file():
            return []
        return [
            json.loads(line)
            for line in self.rows.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def _report(self) -> dict[str, Any]:
        rows = self._read_rows()
        wrong = complaint(rows, steps=self.steps)
        if rows:
            words: list[str | Path] = [TRAINER, "-m", "examples.train_demo.trainer.report"]
            done = subprocess.run(
                [*words, "--rows", self.rows, "--results", self.results],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise DemoFailed(f"the results could not be written:\n{done.stderr}")
            self.console.print(f"written: {self.results}/train-demo.png, .md, .json")
        if wrong:
            raise DemoFailed(wrong)
        return summary(rows)

    def down(self) -> None:
        """End everything; nothing can interrupt it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.stack.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Train; 0 only if the reward rose and the log-probabilities of every batch agreed."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo")
    parser.add_argument("--var", type=Path, default=ROOT / "var")
    parser.add_argument("--runtime", default="apptainer")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if options.runtime != "apptainer":
        parser.error("the tasks put commands into the sandbox's /usr/local/bin: RUNTIME=apptainer")
    if not TRAINER.is_file():
        parser.error(f"{TRAINER} is missing: make train-demo installs it")
    console = Console(width=min(max(shutil.get_terminal_size((120, 40)).columns, 100), 140))
    # SIGINT too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    demo = TrainDemo(options.var.resolve(), options.results.resolve(), options.steps, console)
    status = 1
    try:
        console.print_json(data=demo.run())
        console.print("[bold green]training demonstration passed[/]")
        status = 0
    except (DemoFailed, ServiceRefused, StackError) as error:
        console.print(f"training demonstration failed: {error}", markup=False, style="bold red")
    except KeyboardInterrupt:
        console.print("interrupted: ending every process and sandbox")
        status = 130
    finally:
        demo.down()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
