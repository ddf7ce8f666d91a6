"""Run one program through the spawner: feed it, drain it, and stop it in time."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sandboxes.runtime.protocol import ExecResult
from sandboxes.runtime.sessions import Cancelled
from sandboxes.runtime.spawner import POLL_SECONDS, Channel, Spawner
from sandboxes.runtime.streams import HeadTail

_CHUNK = 65536
_END_SECONDS = 10.0
_DRAIN_READS = 4  # a pipe holds 64 KiB


class _Pump:
    """Move bytes between our ends of the pipes and buffers of bounded size."""

    def __init__(self, stdin: bytes, ends: dict[str, int], limit: int) -> None:
        self._pending = memoryview(stdin)
        self._ends = ends
        self.captured = {"stdout": HeadTail(limit), "stderr": HeadTail(limit)}
        self.entered = False
        self._poller = select.poll()
        self._names: dict[int, str] = {}
        for name, descriptor in list(ends.items()):
            os.set_blocking(descriptor, False)
            self._names[descriptor] = name
            self._poller.register(descriptor, select.POLLOUT if name == "stdin" else select.POLLIN)
        if not stdin:
            self._close("stdin")

    def add(self, channel: Channel) -> None:
        self._poller.register(channel.fileno(), select.POLLIN)
        self._names[channel.fileno()] = "channel"

    def step(self, seconds: float) -> bool:
        """Move what can be moved; returns whether the channel has a message."""
        told = False
        for descriptor, _ in self._poller.poll(max(0.0, seconds) * 1000):
            name = self._names[descriptor]
            if name == "channel":
                told = True
            elif name == "stdin":
                self._write()
            else:
                self._read(name)
        return told

    def drain(self) -> None:
        """Take what lies in the pipes already; daemons that hold them open are not awaited."""
        for name in ("status", "stdout", "stderr"):
            for _ in range(_DRAIN_READS):
                if name not in self._ends or not self._read(name):
                    break

    def close(self) -> None:
        for name in list(self._ends):
            self._close(name)

    def _write(self) -> None:
        try:
            written = os.write(self._ends["stdin"], self._pending[:_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            self._close("stdin")
            return
        self._pending = self._pending[written:]
        if not self._pending:
            self._close("stdin")

    def _read(self, name: str) -> bool:
        try:
            data = os.read(self._ends[name], _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(name)
            return False
        if name == "status":
            self.entered = True
        else:
            self.captured[name].feed(data)
        return True

    def _close(self, name: str) -> None:
        descriptor = self._ends.pop(name)
        with suppress(KeyError):
            self._poller.unregister(descriptor)
        os.close(descriptor)


def run_program(
    spawner: Spawner,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes,
    timeout_seconds: float,
    output_bytes: int,
    cancelled: Cancelled | None,
    limits: Mapping[str, Any] | None = None,
    cwd: str = "/",
) -> tuple[ExecResult, bool]:
    """Run a program; returns its result and whether it wrote to descriptor 3."""
    began = time.monotonic()
    theirs: list[int] = []
    ends: dict[str, int] = {}
    for name in ("stdin", "stdout", "stderr", "status"):
        read, write = os.pipe2(os.O_CLOEXEC)
        theirs.append(read if name == "stdin" else write)
        ends[name] = write if name == "stdin" else read
    pump = _Pump(stdin, ends, output_bytes)
    try:
        channel = spawner.execute(
            argv, env=env, descriptors=theirs, targets=(0, 1, 2, 3), limits=limits, cwd=cwd
        )
    except BaseException:
        pump.close()
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    with channel:
        try:
            pump.add(channel)
            code, why = _follow(pump, channel, began + timeout_seconds, cancelled)
            pump.drain()
        finally:
            pump.close()
    out, err = pump.captured["stdout"], pump.captured["stderr"]
    result = ExecResult(
        exit_code=code if why is None else None,
        stdout=out.joined(),
        stderr=err.joined(),
        duration_seconds=time.monotonic() - began,
        truncated=out.truncated or err.truncated,
        timed_out=why == "timeout",
        cancelled=why == "cancelled",
    )
    return result, pump.entered


def _follow(
    pump: _Pump, channel: Channel, deadline: float, cancelled: Cancelled | None
) -> tuple[int, str | None]:
    """Wait for the end; returns the exit code and why the program was killed, if it was."""
    why: str | None = None
    while True:
        now = time.monotonic()
        if why is None:
            if cancelled is not None and cancelled():
                why = "cancelled"
            elif now >= deadline:
                why = "timeout"
            if why is not None:
                channel.send({"op": "kill"})
                deadline = now + _END_SECONDS
        elif now >= deadline:
            return -1, why
        left = deadline - now
        if pump.step(left if cancelled is None else min(left, POLL_SECONDS)):
            message, _ = channel.receive()
            return int(message["status"]), why
