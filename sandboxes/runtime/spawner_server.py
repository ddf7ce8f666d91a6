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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.runtime import anchor, cut, jobs, keeper, launcher, live, warm, wire
from sandboxes.runtime.account import adopt_orphans, become, forbid_new_privileges
from sandboxes.runtime.confine import SERVICE_SCORE, raise_own_score
from sandboxes.runtime.layout import Layout
from sandboxes.runtime.serving import FILE_LIMITS, MOST_FILES, RESERVED, Child, Server, reserve

_JOBS: dict[str, Callable[[Layout, socket.socket, wire.Message], None]] = {
    "start": keeper.run,
    "anchor": anchor.run,
    "driver": jobs.find_driver,
    "stop": jobs.stop,
    "freeze": jobs.freeze,
    "snapshot": live.snapshot,
    "cut": cut.run,
    "listen": live.listen,
    "discard": jobs.discard,
    "evict": jobs.evict,
    "sweep": jobs.sweep_trash,
}


@dataclass
class _Offered:
    """Hold a request that a launcher has not answered yet."""

    answer: socket.socket
    message: wire.Message
    descriptors: list[int]
    closed: bool = False


class SpawnerServer(Server):
    """Serve one worker until its control stream ends."""

    def __init__(self, control: socket.socket, layout: Layout) -> None:
        super().__init__(control)
        self._layout = layout

    def accept(self) -> bool:
        """Take one request, or hand it over to the launcher of its instance."""
        received = wire.receive(self._source)
        if received is None:
            return False
        message, descriptors = received
        name = (message.get("limits") or {}).get("launcher")
        answer = launcher.offer(self._layout, name, message, descriptors) if name else None
        if answer is None:
            self.take(message, descriptors)
        else:
            offered = _Offered(answer, message, descriptors)
            self._selector.register(answer, selectors.EVENT_READ, offered)
        return True

    def attend(self, watched: Any) -> None:
        """Attend to a child's channel, or to a launcher's answer: what it left is done here."""
        if not isinstance(watched, _Offered):
            super().attend(watched)
            return
        self._selector.unregister(watched.answer)
        if launcher.was_taken(watched.answer):
            wire.close_all(watched.descriptors)
        else:
            self.take(watched.message, watched.descriptors)

    def begin(self, message: wire.Message, channel: socket.socket, passed: list[int]) -> None:
        """Start what a message asks for: a program, or one of our own jobs."""
        kind = message["op"]
        if kind == "take":
            jobs.answer(warm.take, self._layout, channel, message)
            channel.close()
        elif kind in _JOBS:
            self._job(message, channel)
        else:
            super().begin(message, channel, passed)

    def _job(self, message: wire.Message, channel: socket.socket) -> None:
        pid = os.fork()
        if pid:
            channel.close()
            self.watch(Child(channel=channel, pid=pid, job=True))
            return
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.setsid()
            keep = channel.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, MOST_FILES)
            jobs.answer(_JOBS[message["op"]], self._layout, channel, message)
        finally:
            os._exit(0)


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
    moved = fcntl.fcntl(control_number, fcntl.F_DUPFD_CLOEXEC, RESERVED.stop)
    os.close(control_number)
    reserve()
    control = socket.socket(fileno=moved)
    layout = Layout(root)
    most = min(MOST_FILES, FILE_LIMITS[1]) if FILE_LIMITS[1] >= 0 else MOST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, FILE_LIMITS[0]), FILE_LIMITS[1]))
    try:
        os.chdir(root)
        layout.make()
    except OSError as fault:
        wire.send(control, {"event": "error", "code": "", "message": str(fault)})
        return
    wire.send(control, {"event": "ready", "pid": os.getpid()})
    gc.collect()
    gc.freeze()  # keepers are forks: leave their pages shared
    SpawnerServer(control, layout).serve()


if __name__ == "__main__":
    main(sys.argv)
