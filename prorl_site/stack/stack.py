"""One machine's whole stack: embedded engines, the Procfile's processes, and a clean end."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from prorl_site.stack.engines import Engines, free_port, write_env_file
from prorl_site.stack.processes import ROOT, STAGES, Processes, stack_environment

READY_SECONDS = 90.0


class StackError(Exception):
    """The stack cannot go on; the message says why and shows the log that tells more."""


@dataclass
class Stack:
    """The stack below `var_dir`; `settings` are PRORL_ variables for its processes."""

    var_dir: Path
    settings: dict[str, str] = field(default_factory=dict)
    database: str = "prorl"
    host: str = "127.0.0.1"
    port: int = 0
    engines: Engines | None = None
    processes: Processes | None = None
    _lock: IO[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Return the address of the web server."""
        return f"http://{self.host}:{self.port}"

    def prepare(self) -> None:
        """End what a killed run left, start the engines, write var/stack.env, migrate."""
        (self.var_dir / "static").mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._end_leftovers()
        self.port = self.port or free_port()
        write_env_file(
            self.var_dir / "stack.env",
            {
                **self._engine_addresses(),
                "PRORL_HOST": self.host,
                "PRORL_PORT": str(self.port),
                **self.settings,
            },
        )
        self.processes = Processes(self.var_dir, stack_environment(self.var_dir))
        self._remember()
        self.manage("migrate", "--verbosity", "0")

    def _engine_addresses(self) -> dict[str, str]:
        """Return the servers that the environment names, or those of the embedded engines."""
        named = {name: os.environ.get(name, "") for name in ("DATABASE_URL", "BROKER_URL")}
        if self.engines is None and all(named.values()):
            return named
        if self.engines is None and any(named.values()):
            raise StackError(
                "set both DATABASE_URL and BROKER_URL to use servers of your own, or neither "
                "to use the embedded ones"
            )
        if self.engines is None:
            self.engines = Engines(self.var_dir)
            self.engines.start()
        return {
            "DATABASE_URL": self.engines.database_url(self.database),
            "BROKER_URL": self.engines.broker_url,
        }

    def manage(self, *arguments: str, timeout_seconds: float = 300.0) -> str:
        """Run a `manage.py` command and return what it printed. Raises StackError."""
        return self.python(str(ROOT / "manage.py"), *arguments, timeout_seconds=timeout_seconds)

    def python(self, *arguments: str, timeout_seconds: float = 300.0) -> str:
        """Run Python with the stack's settings and return what it printed. Raises StackError."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=stack_environment(self.var_dir),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        if done.returncode != 0:
            raise StackError(
                f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def start(self, *names: str) -> None:
        """Start processes of the Procfile; all of them when none is named."""
        for name in names or STAGES:
            self.started().start(name)
        self._remember()

    def start_other(self, name: str, command: str) -> None:
        """Start a process that the Procfile does not know, such as a model server."""
        self.started().start(name, command)
        self._remember()

    def started(self) -> Processes:
        """Return the processes. Raises StackError before `prepare`."""
        if self.processes is None:
            raise StackError("prepare() the stack first")
        return self.processes

    def wait_ready(self, path: str = "/readyz", seconds: float = READY_SECONDS) -> None:
        """Wait until the web server says that everything is there. Raises StackError."""
        self.wait_for(lambda: _answers(f"{self.url}{path}"), f"{self.url}{path}", seconds)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for a condition, and notice at once when a process ends. Raises StackError."""
        deadline = time.monotonic() + seconds
        while not condition():
            for name, status in self.started().dead().items():
                raise StackError(
                    f"{name} ended with {status}:\n{self.started().log_tail(name, 40)}"
                )
            if time.monotonic() > deadline:
                raise StackError(f"{what} did not come within {seconds:g} s; {self._hints()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End every process, sandbox and engine of this stack; idempotent, in this order."""
        if self.processes is not None:
            self.processes.stop()
            with suppress(StackError, subprocess.TimeoutExpired):
                self.manage("sweep_sandboxes", "--all", timeout_seconds=60)
            self.processes = None
        if self.engines is not None:
            self.engines.stop()
            self.engines = None
        if self._lock is None:
            return
        (self.var_dir / "processes.json").unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def _take_lock(self) -> None:
        """Be the only stack of this folder. Raises StackError when another one is up."""
        if self._lock is not None:
            return
        lock = (self.var_dir / "stack.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StackError(
                f"another stack is up in {self.var_dir}: end it, or choose another folder "
                f"with VAR=…"
            ) from None
        self._lock = lock

    def _hints(self) -> str:
        return f"the logs are in {self.var_dir / 'log'}"

    def _remember(self) -> None:
        """Write down pid and start time of each process, for the next run after a SIGKILL."""
        pids = {name: process.pid for name, process in self.started().running.items()}
        if self.engines is not None:
            pids["broker"] = self.engines.broker_pid
        known = {}
        for name, pid in pids.items():
            with suppress(psutil.NoSuchProcess):
                known[name] = [pid, psutil.Process(pid).create_time()]
        (self.var_dir / "processes.json").write_text(json.dumps(known))

    def _end_leftovers(self) -> None:
        """End the processes that a killed run of this very stack left, by pid and start time."""
        path = self.var_dir / "processes.json"
        if not path.is_file():
            return
        for pid, created in json.loads(path.read_text()).values():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).create_time() == created:
                    _kill(pid)
        path.unlink()


def _kill(pid: int) -> None:
    """End a process, and its session where it leads one."""
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
