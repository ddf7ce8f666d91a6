"""One process per instance that starts the programs which enter it.

Moving a process into a control group makes the kernel wait for all its processors, some
milliseconds each time. The launcher is moved once, while its instance starts, and what it
starts is born in the groups. It is no part of the instance: it ends with its keeper.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sandboxes.runtime import cgroups, wire
from sandboxes.runtime.account import adopt_orphans, end_with_parent
from sandboxes.runtime.layout import Layout
from sandboxes.runtime.serving import MOST_FILES, RESERVED, Server, reserve

_SOCKET = "launcher"
_WAITING = 64  # requests that may wait to be taken
_TAKEN = b"taken"


def offer(
    layout: Layout, name: str, message: wire.Message, descriptors: list[int]
) -> socket.socket | None:
    """Send a request to the instance's launcher; returns where its answer comes, if it has one.

    The answer is a word when the launcher took the request, and the end of the stream when it
    ended before that: what is sent to a process that ends is lost without an error.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _Folder(layout.instance(name)) as folder:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wire.MAX_MESSAGE_BYTES)
            end.connect(folder.path(_SOCKET))
            wire.send(end, message, descriptors)
    except (OSError, ValueError):
        end.close()
        return None
    return end


def was_taken(end: socket.socket) -> bool:
    """Read the answer that an offer has got, and close it."""
    with end:
        try:
            return end.recv(len(_TAKEN)) == _TAKEN
        except OSError:
            return False


def start(home: Path, groups: Mapping[str, str]) -> int:
    """Fork the launcher of the instance whose folder is `home`; returns its pid.

    It takes requests once it is in the groups, if there are any.
    """
    with _Folder(home) as folder:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(folder.path(_SOCKET))
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.setsid()
        cgroups.enter(cgroups.entrances(dict(groups)))
        kept = fcntl.fcntl(listener.detach(), fcntl.F_DUPFD_CLOEXEC, RESERVED.stop)
        os.closerange(3, kept)
        os.closerange(kept + 1, MOST_FILES)
        reserve()
        adopt_orphans()
        source = socket.socket(fileno=kept)
        source.listen(_WAITING)
        _Launcher(source, keeper).serve()
    finally:
        os._exit(0)


class _Launcher(Server):
    """Serve whoever connects, until SIGTERM: then until what was started has ended."""

    def __init__(self, source: socket.socket, keeper: int) -> None:
        super().__init__(source, grouped=True)
        self._ending = False
        signal.signal(signal.SIGTERM, self._on_signal)
        end_with_parent(keeper, signal.SIGTERM)

    def _on_signal(self, *_: object) -> None:
        self._ending = True

    def over(self) -> bool:
        return self._ending and not self._children

    def accept(self) -> bool:
        end, _ = self._source.accept()
        with end:
            received = wire.receive(end)
            if received is not None:
                with suppress(OSError):
                    end.send(_TAKEN)
        if received is not None:
            self.take(*received)
        return True


class _Folder:
    """Reach into a folder by a short path: that of a socket may have 108 bytes."""

    def __init__(self, folder: Path) -> None:
        self._number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def path(self, name: str) -> str:
        return f"/proc/self/fd/{self._number}/{name}"
