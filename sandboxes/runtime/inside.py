"""A look into one instance from the host, opened before anything hostile runs in it."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime.processes import all_pids

_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_ANSWER_BYTES = 4096
# A process that ended, or is another user's: any other fault is the reader's own.
_NOT_SEEN = (FileNotFoundError, ProcessLookupError, PermissionError)


class View:
    """Hold the instance's own /proc, which lists its processes only, entered ones included.

    The folder stays open: what is mounted over /proc in there later changes nothing. Where it
    cannot be opened (a set-uid engine), every process of the node is looked at instead.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._folder: int | None = None
        self._segments: int | None = None
        with suppress(OSError):
            path = f"/proc/{pid}/root/proc"
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            self._segments = _open_segments(pid)

    def processes(self) -> Iterator[Path]:
        """Yield the /proc folder of every process in the instance."""
        if self._folder is None:
            for member in namespace_members(self._pid):
                yield Path(f"/proc/{member}")
            return
        with suppress(OSError):
            for entry in Path(f"/proc/self/fd/{self._folder}").iterdir():
                if entry.name.isdigit():
                    yield entry

    def segment_bytes(self) -> int:
        """Return the bytes of the System V segments, which need no process to hold them."""
        if self._segments is None:
            return 0
        # The namespace is that of the process that opened the file, not of the reader.
        text = b""
        while data := os.pread(self._segments, 1 << 16, len(text)):  # a page at a time
            text += data
        rows = [line.split() for line in text.decode().splitlines()]
        place = rows[0].index("rss") if rows and "rss" in rows[0] else None
        return 0 if place is None else sum(int(row[place]) for row in rows[1:])

    def run_inside(self, measure: Callable[[], Any]) -> Any:
        """Return what a function returns as root of the instance's user namespace, or None.

        In there a folder of mode 000 can be read. The value travels as JSON, of a page at
        most, from a fork: this process must have one thread.
        """
        read, write = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            try:
                _enter(self._pid, "user", _CLONE_NEWUSER)
                os.write(write, json.dumps(measure()).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            data = stream.read(_ANSWER_BYTES)
        os.waitpid(child, 0)
        return json.loads(data) if data else None


def namespace_members(pid: int) -> list[int]:
    """Return the processes in the pid namespace of `pid`, those that entered it included."""
    try:
        wanted = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except _NOT_SEEN:
        return []
    members = []
    for member in all_pids():
        with suppress(*_NOT_SEEN):
            if Path(f"/proc/{member}/ns/pid").stat().st_ino == wanted:
                members.append(member)
    return members


def _open_segments(pid: int) -> int | None:
    """Return the open list of the instance's System V segments; None where there is none."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            _enter(pid, "user", _CLONE_NEWUSER)
            _enter(pid, "ipc", _CLONE_NEWIPC)
            opened = os.open("/proc/sysvipc/shm", os.O_RDONLY)
            socket.send_fds(theirs, [b"."], [opened])
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        _, passed, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
    os.waitpid(child, 0)
    return passed[0] if passed else None


def _enter(pid: int, kind: str, flag: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, flag) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(descriptor)
