"""The process that gets one image: it drops to the sandbox account first, and ends with its owner.

Run as `python -m sandboxes.images.program FD UID GID`. The order comes as one line of JSON on
standard input, which then stays open: its end is the owner's, or a cancel, and ends everything
that was started here. What it says is the log; the result goes to FD as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sandboxes.images.exceptions import ImageDiskFull
from sandboxes.images.orders import Order
from sandboxes.images.provide import carry_out
from sandboxes.images.templates import load_all
from sandboxes.runtime.account import adopt_orphans, become, forbid_new_privileges
from sandboxes.runtime.exceptions import SandboxCancelled, SandboxFault
from sandboxes.runtime.processes import descendants, kill_process, raise_oom_score

_END_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class Watch:
    """End the work from outside: at the end of the owner, or before the disk is full."""

    def __init__(self, control: int, reserve_bytes: int, *folders: Path) -> None:
        self._control = control
        self.fault: SandboxFault | None = None
        self._lock = threading.Lock()
        self._reserve_bytes = reserve_bytes
        self._folders = folders
        for work in (self._follow_owner, self._follow_disk):
            threading.Thread(target=work, daemon=True).start()

    def stopped(self) -> bool:
        """Tell whether the work was stopped because the disk is nearly full."""
        return isinstance(self.fault, ImageDiskFull)

    def go_on(self) -> None:
        """Watch again, from now on; raises ImageDiskFull when there is still no room."""
        full = self._find_full()
        if full is not None:
            raise full
        if self.stopped():
            self.fault = None

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Kill nothing meanwhile: what was left is being deleted."""
        with self._lock:
            yield

    def _follow_owner(self) -> None:
        while os.read(self._control, 4096):
            pass
        self._end(SandboxCancelled("cancelled"))
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            self._kill()
        os._exit(1)  # at work in Python itself: the next process sweeps what it leaves

    def _follow_disk(self) -> None:
        while True:
            full = self._find_full() if self.fault is None else None
            if full is not None:
                self._end(full)
            time.sleep(_LOOK_SECONDS)

    def _find_full(self) -> ImageDiskFull | None:
        for folder in self._folders:
            with suppress(OSError):
                free = shutil.disk_usage(folder).free
                if free < self._reserve_bytes:
                    return ImageDiskFull(
                        f"{free} bytes are left on the file system of {folder}, and "
                        f"{self._reserve_bytes} are kept free"
                    )
        return None

    def _end(self, fault: SandboxFault) -> None:
        self.fault = self.fault or fault
        self._kill()

    def _kill(self) -> None:
        if self._lock.acquire(timeout=_END_SECONDS):
            try:
                kill_descendants()
            finally:
                self._lock.release()


def kill_descendants() -> None:
    """Kill every process that was started here, daemons included: they are adopted."""
    for _ in range(5):
        found = descendants(os.getpid())
        if not found:
            return
        for stat in reversed(found):
            kill_process(stat.pid, stat.start_ticks, wait_seconds=0)


def main(argv: list[str]) -> None:
    """Read the order, drop for good, carry it out, and report."""
    result, uid, gid = os.fdopen(int(argv[1]), "w"), int(argv[2]), int(argv[3])
    os.set_inheritable(result.fileno(), False)
    order = Order.from_dict(json.loads(_read_line()))
    control = _take_control()
    load_all()
    if os.geteuid() == 0:
        become(uid, gid)
    forbid_new_privileges()
    adopt_orphans()
    raise_oom_score()
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(order.env)
    watches: list[Watch] = []

    def begin() -> Watch:
        watches.append(Watch(control, order.reserve_bytes, order.root, order.scratch))
        return watches[0]

    answer: dict[str, Any]
    try:
        answer = {"image": carry_out(order, begin=begin)}
    except Exception as error:  # a process boundary: nothing may pass it unseen
        fault = watches[0].fault if watches else None
        answer = _answer(fault or error)
    finally:
        kill_descendants()
    with suppress(BrokenPipeError):
        with result:
            json.dump(answer, result)
        sys.stdout.flush()
    os._exit(0)


def _read_line() -> bytes:
    """Read the order and no more: what follows tells of the owner's end."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)
        data += byte
    return bytes(data)


def _take_control() -> int:
    """Move standard input out of reach of what is started here; returns where it is now."""
    control, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return control


def _answer(error: Exception) -> dict[str, str]:
    if isinstance(error, SandboxFault):
        return {"code": error.code, "message": str(error)}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return {"code": ImageDiskFull.code, "message": str(error)}
    return {"code": "", "message": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv)
