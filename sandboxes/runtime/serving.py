"""Start programs for others and attend to them: one thread, one loop.

Each request comes with a channel of its own; closing the channel ends what was started
through it.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass

from ptyprocess import PtyProcess

from sandboxes.runtime import wire
from sandboxes.runtime.confine import confine
from sandboxes.runtime.exceptions import EnterFailed
from sandboxes.runtime.processes import kill_sessions

FILE_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
MOST_FILES = 65536
RESERVED = range(3, 16)  # kept busy, so that a passed descriptor never meets its target


def reserve() -> None:
    """Occupy the numbers that programs get descriptors at."""
    for number in RESERVED:
        null = os.open("/dev/null", os.O_RDONLY)
        if null != number:
            os.dup2(null, number, inheritable=False)
            os.close(null)


@dataclass
class Child:
    """Hold one program that was started, or one of our own jobs."""

    channel: socket.socket
    pid: int
    terminal: PtyProcess | None = None
    status: int | None = None
    job: bool = False
    closed: bool = False


class Server(ABC):
    """Serve requests until `accept` says that nobody will ask any more.

    `grouped` says that this process is in the sandbox's control groups already, so that what it
    starts is born there.
    """

    def __init__(self, source: socket.socket, *, grouped: bool = False) -> None:
        self._source = source
        self._grouped = grouped
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Run the loop."""
        self._selector.register(self._source, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        while not self.over():
            for key, _ in self._selector.select():
                if key.fileobj is self._source:
                    if not self.accept():
                        self._end_all()
                        return
                elif key.fd == self._wake:
                    self._collect()
                elif not key.data.closed:
                    self.attend(key.data)

    def over(self) -> bool:
        """Tell whether to end although the source has not."""
        return False

    @abstractmethod
    def accept(self) -> bool:
        """Take one request from the source; returns False at the source's end."""

    def take(self, message: wire.Message, descriptors: list[int]) -> None:
        """Carry out one request: its channel comes first, what the program gets follows."""
        channel = socket.socket(fileno=descriptors[0])
        passed = descriptors[1:]
        try:
            self.begin(message, channel, passed)
        except Exception as fault:  # the loop serves everybody: report it and go on
            code = EnterFailed.code if isinstance(fault, OSError) else ""
            with suppress(OSError):
                wire.send(channel, {"event": "error", "code": code, "message": repr(fault)})
            channel.close()
        finally:
            wire.close_all(passed)

    def begin(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> None:
        """Start what a message asks for."""
        start = self._pty if message["op"] == "pty" else self._exec
        child = start(message, channel, passed)
        self.watch(child)
        self._selector.register(child.channel, selectors.EVENT_READ, child)

    def watch(self, child: Child) -> None:
        """Collect a child's end when it comes."""
        self._children[child.pid] = child

    def _exec(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> Child:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _place(passed, message["targets"])
                os.closerange(max(message["targets"]) + 1, MOST_FILES)
                os.chdir(message.get("cwd", "/"))
                self._limit_child(message)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                os.execve(message["argv"][0], message["argv"], message["env"])  # noqa: S606
            except BaseException as fault:
                os.write(2, f"cannot start {message['argv'][0]}: {fault}\n".encode())
            finally:
                os._exit(127)
        return Child(channel=channel, pid=pid)

    def _pty(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> Child:
        def prepare() -> None:
            _place(passed, message["targets"])
            self._limit_child(message)

        terminal = PtyProcess.spawn(
            message["argv"],
            env=message["env"],
            cwd=message.get("cwd", "/"),
            echo=False,
            preexec_fn=prepare,
            dimensions=(50, 200),
            pass_fds=[*passed, *(target for target in message["targets"] if target > 2)],
        )
        terminal.delayafterclose = terminal.delayafterterminate = 0
        wire.send(channel, {"event": "started", "pid": terminal.pid}, [terminal.fd])
        return Child(channel=channel, pid=terminal.pid, terminal=terminal)

    def _limit_child(self, message: wire.Message) -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        limits = message.get("limits") or {}
        confine({**limits, "cgroups": ()} if self._grouped else limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[5]), FILE_LIMITS[1]))

    def attend(self, child: Child) -> None:
        """Read what a child's channel says."""
        received = wire.receive(child.channel)
        if received is None:
            self._close(child)
            return
        message, _ = received
        if message["op"] == "kill" and child.status is None:
            _kill([child])
        elif message["op"] == "kill_foreground" and child.terminal is not None:
            with suppress(OSError):
                group = os.tcgetpgrp(child.terminal.fd)
                if group > 1 and group != message["shell"]:
                    os.killpg(group, signal.SIGKILL)

    def _collect(self) -> None:
        """Reap what ended: our children, and the orphans that came to us as their reaper.

        An orphan left as a zombie would hold the end of its instance up: the kernel ends a
        pid namespace only when each of its processes is collected.
        """
        with suppress(BlockingIOError):
            os.read(self._wake, 65536)
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            child = self._children.get(found.si_pid)
            if child is None:
                os.waitpid(found.si_pid, 0)
            else:
                self._reap(child)

    def _reap(self, child: Child) -> None:
        if child.terminal is not None:
            # Before the wait: the pid, which is the session's name, cannot be reused yet.
            kill_sessions({child.pid})
            child.terminal.terminated = True
        _, status = os.waitpid(child.pid, 0)
        del self._children[child.pid]
        code = os.waitstatus_to_exitcode(status)
        child.status = code if code >= 0 else 128 - code
        if child.closed:
            self._let_go(child)
        elif not child.job:
            with suppress(OSError):
                wire.send(child.channel, {"event": "exit", "status": child.status})

    def _close(self, child: Child) -> None:
        self._selector.unregister(child.channel)
        child.channel.close()
        child.closed = True
        if child.status is None:
            _kill([child])  # its end is collected when it comes
        else:
            self._let_go(child)

    def _let_go(self, child: Child) -> None:
        if child.terminal is not None:
            child.terminal.close()

    def _end_all(self) -> None:
        _kill([c for c in self._children.values() if not c.job and c.status is None])


def _kill(children: list[Child]) -> None:
    """SIGKILL children that were not reaped yet, with their sessions.

    Also by pid: a child that was just forked may not have its session yet.
    """
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    kill_sessions({child.pid for child in children})


def _place(descriptors: list[int], targets: list[int]) -> None:
    for source, target in zip(descriptors, targets, strict=True):
        os.dup2(source, target)  # inheritable
