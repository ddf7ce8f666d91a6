"""The spawner's own process: one thread, one loop, no way back to root.

Run as `python -m sandboxes.runtime.spawner_server FD ROOT UID GID FILES`, where FILES is
the soft limit of open files that programs get. Each request comes
with a channel of its own; closing the channel ends what was started through it. When the
worker dies (end of the control stream) its children are ended; keepers and their
instances, sessions of their own, go on.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ptyprocess import PtyProcess

from sandboxes.runtime import anchor, jobs, keeper, live, warm, wire
from sandboxes.runtime.account import adopt_orphans, become, forbid_new_privileges
from sandboxes.runtime.confine import SERVICE_SCORE, confine, raise_own_score
from sandboxes.runtime.exceptions import EnterFailed
from sandboxes.runtime.layout import Layout
from sandboxes.runtime.processes import kill_sessions

_FILE_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
_MOST_FILES = 65536
_RESERVED = range(3, 16)  # kept busy, so that a passed descriptor never meets its target
_JOBS: dict[str, Callable[[Layout, socket.socket, wire.Message], None]] = {
    "start": keeper.run,
    "anchor": anchor.run,
    "driver": jobs.find_driver,
    "stop": jobs.stop,
    "freeze": jobs.freeze,
    "snapshot": live.snapshot,
    "listen": live.listen,
    "discard": jobs.discard,
    "evict": jobs.evict,
    "sweep": jobs.sweep_trash,
}


@dataclass
class _Child:
    channel: socket.socket
    pid: int
    terminal: PtyProcess | None = None
    status: int | None = None
    job: bool = False
    closed: bool = False


def _limit_child(message: wire.Message) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    confine(message.get("limits") or {})
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[5]), _FILE_LIMITS[1]))


def _kill(children: list[_Child]) -> None:
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


class Server:
    """Serve requests until the control stream ends."""

    def __init__(self, control: socket.socket, layout: Layout) -> None:
        self._control = control
        self._layout = layout
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Run the loop."""
        self._selector.register(self._control, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._accept():
                        self._end_all()
                        return
                elif key.fd == self._wake:
                    self._collect()
                elif not key.data.closed:
                    self._attend(key.data)

    def _accept(self) -> bool:
        received = wire.receive(self._control)
        if received is None:
            return False
        message, descriptors = received
        channel = socket.socket(fileno=descriptors[0])
        passed = descriptors[1:]
        try:
            self._begin(message, channel, passed)
        except Exception as fault:  # the loop serves everybody: report it and go on
            code = EnterFailed.code if isinstance(fault, OSError) else ""
            with suppress(OSError):
                wire.send(channel, {"event": "error", "code": code, "message": repr(fault)})
            channel.close()
        finally:
            wire.close_all(passed)
        return True

    def _begin(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> None:
        kind = message["op"]
        if kind == "exec":
            child = self._exec(message, channel, passed)
        elif kind == "pty":
            child = self._pty(message, channel, passed)
        elif kind == "take":
            jobs.answer(warm.take, self._layout, channel, message)
            channel.close()
            return
        else:
            self._job(message, channel)
            return
        self._children[child.pid] = child
        self._selector.register(child.channel, selectors.EVENT_READ, child)

    def _exec(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> _Child:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _place(passed, message["targets"])
                os.closerange(max(message["targets"]) + 1, _MOST_FILES)
                os.chdir(message.get("cwd", "/"))
                _limit_child(message)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                os.execve(message["argv"][0], message["argv"], message["env"])  # noqa: S606
            except BaseException as fault:
                os.write(2, f"cannot start {message['argv'][0]}: {fault}\n".encode())
            finally:
                os._exit(127)
        return _Child(channel=channel, pid=pid)

    def _pty(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> _Child:
        def prepare() -> None:
            _place(passed, message["targets"])
            _limit_child(message)

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
        return _Child(channel=channel, pid=terminal.pid, terminal=terminal)

    def _job(self, message: wire.Message, channel: socket.socket) -> None:
        pid = os.fork()
        if pid:
            channel.close()
            child = _Child(channel=channel, pid=pid, job=True)
            self._children[pid] = child
            return
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.setsid()
            keep = channel.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, _MOST_FILES)
            jobs.answer(_JOBS[message["op"]], self._layout, channel, message)
        finally:
            os._exit(0)

    def _attend(self, child: _Child) -> None:
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

    def _reap(self, child: _Child) -> None:
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

    def _close(self, child: _Child) -> None:
        self._selector.unregister(child.channel)
        child.channel.close()
        child.closed = True
        if child.status is None:
            _kill([child])  # its end is collected when it comes
        else:
            self._let_go(child)

    def _let_go(self, child: _Child) -> None:
        if child.terminal is not None:
            child.terminal.close()

    def _end_all(self) -> None:
        _kill([c for c in self._children.values() if not c.job and c.status is None])


def main(argv: list[str]) -> None:
    """Drop to the account, then serve."""
    control_number, root, uid, gid = int(argv[1]), Path(argv[2]), int(argv[3]), int(argv[4])
    os.set_inheritable(control_number, False)
    raise_own_score(SERVICE_SCORE)
    if os.geteuid() == 0 and uid != 0:  # uid 0 is asked for by the local runtime only
        become(uid, gid)
    forbid_new_privileges()
    adopt_orphans()
    os.setsid()
    os.umask(0o022)
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, lambda *_: None)  # not SIG_IGN, which children would inherit
    moved = fcntl.fcntl(control_number, fcntl.F_DUPFD_CLOEXEC, _RESERVED.stop)
    os.close(control_number)
    for number in _RESERVED:
        null = os.open("/dev/null", os.O_RDONLY)
        if null != number:
            os.dup2(null, number, inheritable=False)
            os.close(null)
    control = socket.socket(fileno=moved)
    layout = Layout(root)
    most = min(_MOST_FILES, _FILE_LIMITS[1]) if _FILE_LIMITS[1] >= 0 else _MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, _FILE_LIMITS[0]), _FILE_LIMITS[1]))
    try:
        os.chdir(root)
        layout.make()
    except OSError as fault:
        wire.send(control, {"event": "error", "code": "", "message": str(fault)})
        return
    wire.send(control, {"event": "ready", "pid": os.getpid()})
    gc.collect()
    gc.freeze()  # keepers are forks: leave their pages shared
    Server(control, layout).serve()


if __name__ == "__main__":
    main(sys.argv)
