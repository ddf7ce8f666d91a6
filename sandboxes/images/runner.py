"""Start the process that gets an image, follow its log, and end it in time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.images.exceptions import ImageTimeout, ImageWorkLost, fault_of
from sandboxes.images.orders import Order
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import HOST_PATH
from sandboxes.runtime.exceptions import SandboxCancelled
from sandboxes.runtime.processes import (
    ProcessStat,
    descendants,
    is_running,
    kill_process,
    kill_sessions,
    read_stat,
)
from sandboxes.runtime.sessions import Cancelled

OnLog = Callable[[str], None]

POLL_SECONDS = 0.1  # how often `cancelled` is asked
LOG_SECONDS = 0.5  # how often what was said is passed on
END_SECONDS = 15.0  # what the process has to clean up after itself
_CHUNK = 65536
_DRAIN_READS = 16
_MAX_RESULT = 1024 * 1024


def run_order(
    order: Order,
    *,
    account: Account,
    timeout_seconds: float,
    cancelled: Cancelled | None = None,
    on_log: OnLog | None = None,
) -> dict[str, Any]:
    """Carry out an order in a process of its own; returns what `provide.carry_out` returned.

    Raises the work's faults, ImageTimeout, SandboxCancelled, ImageWorkLost. Nothing that the
    process started runs afterwards.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = _start(account, writer)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    follower = _Follower(process, reader, on_log)
    try:
        follower.send(json.dumps(order.as_dict()).encode() + b"\n")
        why = follower.follow(time.monotonic() + timeout_seconds, cancelled)
    finally:
        follower.end()
    if why == "timeout":
        raise ImageTimeout(f"the image was not there within {timeout_seconds:.3g} s")
    if why == "cancelled":
        raise SandboxCancelled("cancelled while the image was made")
    return follower.result()


def _start(account: Account, writer: int) -> subprocess.Popen[bytes]:
    search = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "sandboxes.images.program"),
            *(str(writer), str(account.uid), str(account.gid)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            "PATH": HOST_PATH,
            "PYTHONPATH": os.pathsep.join(search),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
        },
        cwd="/",
        pass_fds=(writer,),
        start_new_session=True,
    )


class _Follower:
    """Read one process to its end, whatever of it holds the pipes open."""

    def __init__(self, process: subprocess.Popen[bytes], reader: int, on_log: OnLog | None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._reader = reader
        self._on_log = on_log
        self._pending = bytearray()
        self._told_at = time.monotonic()
        self._result = bytearray()
        self._seen: dict[tuple[int, int], ProcessStat] = {}
        stat = read_stat(process.pid)
        self._ticks = stat.start_ticks if stat else 0
        self._pidfd = os.pidfd_open(process.pid)
        self._poller = select.poll()
        for descriptor in (self._stdout.fileno(), reader):
            os.set_blocking(descriptor, False)
            self._poller.register(descriptor, select.POLLIN)
        self._poller.register(self._pidfd, select.POLLIN)

    def send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):
            self._stdin.write(line)
            self._stdin.flush()

    def follow(self, deadline: float, cancelled: Cancelled | None) -> str:
        """Wait for the end; returns why it was ended from here: timeout, cancelled, or empty."""
        why = ""
        while self._process.poll() is None:
            now = time.monotonic()
            if not why:
                if cancelled is not None and cancelled():
                    why = "cancelled"
                elif now >= deadline:
                    why = "timeout"
                if why:
                    self._give_up()
                    deadline = now + END_SECONDS
            elif now >= deadline:
                break
            left = max(0.0, min(deadline - now, POLL_SECONDS))
            self._move(left)
        return why

    def end(self) -> None:
        """Kill what is left, drain the pipes, and close everything."""
        self._give_up()
        if self._process.poll() is None:
            self._note_descendants()
            kill_process(self._process.pid, self._ticks, wait_seconds=5)
        kill_sessions({self._process.pid})
        self._kill_seen()
        self._process.wait()
        for _ in range(_DRAIN_READS):
            self._move(0)
        self._tell()
        self._stdout.close()
        os.close(self._reader)
        os.close(self._pidfd)

    def result(self) -> dict[str, Any]:
        """Return what the process reported; raises the fault that it reported."""
        try:
            answer = json.loads(self._result)
        except ValueError:
            code = self._process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            raise ImageWorkLost(f"the process that made the image ended with {how}") from None
        if "image" in answer:
            return dict(answer["image"])
        raise fault_of(str(answer["code"]), str(answer["message"]))

    def _give_up(self) -> None:
        """Close the process's standard input, which tells it to end."""
        with suppress(OSError):
            self._stdin.close()

    def _move(self, seconds: float) -> None:
        for descriptor, _ in self._poller.poll(seconds * 1000):
            if descriptor == self._pidfd:
                continue
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                self._poller.unregister(descriptor)
            elif descriptor != self._reader:
                self._pending += data
            elif len(self._result) < _MAX_RESULT:
                self._result += data
        if time.monotonic() - self._told_at >= LOG_SECONDS:
            self._note_descendants()
            self._tell()

    def _note_descendants(self) -> None:
        """Remember what runs below: where the process is killed, its orphans become init's."""
        for stat in descendants(self._process.pid):
            self._seen[stat.pid, stat.start_ticks] = stat

    def _kill_seen(self) -> None:
        """Kill what the process left, and what that started; usually nothing."""
        for stat in self._seen.values():
            if is_running(stat.pid, stat.start_ticks):
                for below in [*reversed(descendants(stat.pid)), stat]:
                    kill_process(below.pid, below.start_ticks, wait_seconds=1)

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        if self._pending and self._on_log is not None:
            text = self._pending.decode("utf-8", "replace")
            self._pending.clear()
            self._on_log(text.replace("\x00", "\N{REPLACEMENT CHARACTER}"))
