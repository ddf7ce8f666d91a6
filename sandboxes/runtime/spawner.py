"""The worker's side of the spawner: requests from any thread, descriptors back."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from sandboxes.runtime import exceptions, wire
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import HOST_PATH
from sandboxes.runtime.exceptions import (
    EnterFailed,
    RuntimeMissing,
    SandboxCancelled,
    SandboxFault,
    StartTimeout,
)
from sandboxes.runtime.open_files import found_file_limit
from sandboxes.runtime.sessions import Cancelled

START_SECONDS = 30.0
POLL_SECONDS = 0.1  # how often `cancelled` is asked

_FAULTS: dict[str, type[SandboxFault]] = {
    kind.code: kind
    for kind in vars(exceptions).values()
    if isinstance(kind, type) and issubclass(kind, SandboxFault)
}


class Channel:
    """Hold one request; closing it ends what the request started."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor to poll for the next message."""
        return self._end.fileno()

    def receive(self) -> tuple[wire.Message, list[int]]:
        """Return the next message; raises the fault it carries, RuntimeMissing at the end."""
        received = wire.receive(self._end)
        if received is None:
            raise RuntimeMissing("the process that works on this request ended")
        message, descriptors = received
        if message["event"] == "error":
            wire.close_all(descriptors)
            fault = _FAULTS.get(message["code"], SandboxFault)
            raise fault(message["message"])
        return message, descriptors

    def send(self, message: wire.Message) -> None:
        """Send an order about what runs; nothing happens when it has ended."""
        with suppress(OSError):
            wire.send(self._end, message)

    def wait(
        self, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> tuple[wire.Message, list[int]]:
        """Wait for the next message; raises StartTimeout, SandboxCancelled and its fault."""
        deadline = time.monotonic() + timeout_seconds
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        while True:
            if cancelled is not None and cancelled():
                raise SandboxCancelled("cancelled while waiting for the sandbox")
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartTimeout(f"no answer within {timeout_seconds:g} s")
            if poller.poll(1000 * (left if cancelled is None else min(left, POLL_SECONDS))):
                return self.receive()

    def close(self) -> None:
        """Let go; idempotent. It is shut down first: a fork of ours may hold a copy."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Spawner:
    """Own the process that forks for us; start it before the worker's threads.

    It is a program of its own (not a fork of the worker), with an environment of its own,
    so nothing of the worker's memory or secrets is in it. After a fork of the worker (a
    prefork pool) the child starts a spawner of its own at first use.
    """

    def __init__(self, *, root: Path, account: Account) -> None:
        self._root = root
        self._account = account
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    @property
    def pid(self) -> int | None:
        """Return the pid of the spawner process, None before its start."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process unless it runs; raises RuntimeMissing."""
        with self._lock:
            self._start_locked()

    def request(self, message: wire.Message, descriptors: Sequence[int] = ()) -> Channel:
        """Send one request with the descriptors that the started program gets.

        Raises RuntimeMissing when there is no spawner, EnterFailed when the message is too
        long to be sent (about 1 MB of arguments and environment).
        """
        ours, theirs = wire.make_pair()
        try:
            try:
                self._send(message, [theirs.fileno(), *descriptors])
            except (BrokenPipeError, ConnectionResetError):  # it was killed: start another
                self.close()
                self._send(message, [theirs.fileno(), *descriptors])
        except OSError as fault:
            ours.close()
            raise EnterFailed(f"the spawner did not take the request: {fault}") from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Channel(ours)

    def _send(self, message: wire.Message, descriptors: list[int]) -> None:
        with self._lock:
            control = self._start_locked()
        wire.send(control, message, descriptors)

    def run_job(
        self,
        message: wire.Message,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> dict[str, Any]:
        """Run one of the spawner's jobs to its result; raises the job's fault."""
        with self.request(message) as channel:
            return channel.wait(timeout_seconds=timeout_seconds, cancelled=cancelled)[0]

    def execute(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        descriptors: Sequence[int],
        targets: Sequence[int],
        limits: Mapping[str, Any] | None = None,
        cwd: str = "/",
    ) -> Channel:
        """Start a program in a session of its own with descriptors at given numbers."""
        message = _program("exec", argv, env, targets, limits, cwd)
        return self.request(message, descriptors)

    def open_terminal(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        descriptors: Sequence[int],
        targets: Sequence[int],
        limits: Mapping[str, Any] | None = None,
        cwd: str = "/",
    ) -> tuple[Channel, int]:
        """Start a program on a new pseudo-terminal; returns its channel and the master."""
        channel = self.request(_program("pty", argv, env, targets, limits, cwd), descriptors)
        try:
            _, passed = channel.wait(timeout_seconds=START_SECONDS)
        except BaseException:
            channel.close()
            raise
        return channel, passed[0]

    def close(self) -> None:
        """End the spawner and its children; instances and their keepers go on."""
        with self._lock:
            control, process = self._control, self._process
            self._control = self._process = None
            if control is not None:
                if self._owner == os.getpid():
                    with suppress(OSError):
                        control.shutdown(socket.SHUT_RDWR)
                control.close()
            if process is not None and self._owner == os.getpid():
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _forget(self) -> None:
        """Let go of the parent's spawner in a fork: it must see the parent's end."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child: its destructor must not complain
        self._control = self._process = None

    def _start_locked(self) -> socket.socket:
        if self._control is not None and self._owner == os.getpid():
            return self._control
        ours, theirs = wire.make_pair()
        search = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
        uid, gid = self._account.uid, self._account.gid
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sandboxes.runtime.spawner_server"),
                    *(str(theirs.fileno()), str(self._root), str(uid), str(gid)),
                    str(found_file_limit()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    "PATH": HOST_PATH,
                    "PYTHONPATH": os.pathsep.join(search),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "LANG": "C.UTF-8",
                },
                cwd="/",
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
        try:
            Channel(ours).wait(timeout_seconds=START_SECONDS)
        except SandboxFault as fault:
            ours.close()
            process.kill()
            process.wait()
            raise RuntimeMissing(
                f"the spawner did not start: {fault}; {self._account.name} must be able "
                f"to reach and write {self._root}"
            ) from None
        self._control, self._process, self._owner = ours, process, os.getpid()
        return ours


def _program(
    kind: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    targets: Sequence[int],
    limits: Mapping[str, Any] | None,
    cwd: str,
) -> wire.Message:
    return {
        "op": kind,
        "argv": list(argv),
        "env": dict(env),
        "targets": list(targets),
        "limits": dict(limits or {}),
        "cwd": cwd,
    }
