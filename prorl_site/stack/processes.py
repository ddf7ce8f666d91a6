"""The processes of one machine's stack: the Procfile's lines, started, watched and ended by pid."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from honcho.environ import parse_procfile

from prorl_site.env import read_env_file

ROOT = Path(__file__).resolve().parent.parent.parent
STOP_SECONDS = 20.0
STAGES = ("web", "init", "run", "eval", "control", "beat")


def commands() -> dict[str, str]:
    """Return the Procfile's command lines by process name."""
    return dict(parse_procfile((ROOT / "Procfile").read_text()).processes)


def stack_environment(var_dir: Path, **extra: str) -> dict[str, str]:
    """Return the environment of the stack's processes."""
    return {
        **os.environ,
        **read_env_file(var_dir / "stack.env"),
        "PRORL_VAR": str(var_dir),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **extra,
    }


@dataclass
class Processes:
    """Started processes, each in a session of its own with a log file in `var_dir`/log."""

    var_dir: Path
    environment: Mapping[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _logs: dict[str, IO[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: str | None = None, **extra: str) -> subprocess.Popen[bytes]:
        """Start a process of the Procfile, or another command line, under a name."""
        self._close_log(name)
        log = self.log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._logs[name] = log.open("ab")
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command or commands()[name]}"],
            cwd=ROOT,
            env={**self.environment, **extra},
            stdin=subprocess.DEVNULL,
            stdout=self._logs[name],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.running[name] = process
        return process

    def log_path(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.var_dir / "log" / f"{name}.log"

    def log_tail(self, name: str, lines: int = 20) -> str:
        """Return the last lines that a process logged."""
        path = self.log_path(name)
        if not path.is_file():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def dead(self) -> dict[str, int]:
        """Return the exit status of every started process that has ended, by name."""
        found = {name: process.poll() for name, process in self.running.items()}
        return {name: status for name, status in found.items() if status is not None}

    def kill(self, name: str) -> None:
        """End a process and its session at once with SIGKILL."""
        process = self.running.pop(name)
        _signal_group(process, signal.SIGKILL)
        process.wait()
        self._close_log(name)

    def stop(self, *names: str) -> None:
        """End processes (all when none is named): SIGTERM, after the grace SIGKILL."""
        chosen = [name for name in (names or tuple(self.running)) if name in self.running]
        for name in reversed(chosen):
            with suppress(ProcessLookupError):
                self.running[name].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for name in reversed(chosen):
            process = self.running.pop(name)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
            self._close_log(name)

    def _close_log(self, name: str) -> None:
        log = self._logs.pop(name, None)
        if log is not None:
            log.close()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the session's group: what a worker forked goes with it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
