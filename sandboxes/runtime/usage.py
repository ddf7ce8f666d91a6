"""What one instance uses of memory, processes and disk, seen from the host."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime.processes import all_pids

_PAGE = os.sysconf("SC_PAGE_SIZE")
_INTERVAL_SECONDS = 2.0
_IDLE_SECONDS = 3600.0


class Usage:
    """Compare an instance with its limits; a limit of None is not looked at."""

    def __init__(self, pid: int, layer: Path, limits: dict[str, Any]) -> None:
        self._pid = pid
        self._layer = layer
        self._memory = limits.get("memory_bytes")
        self._disk = limits.get("disk_bytes")
        self._next_disk = 0.0
        self._next_memory = 0.0

    @property
    def interval_seconds(self) -> float:
        """Return how long to wait between two looks."""
        watched = self._memory is not None or self._disk is not None
        return _INTERVAL_SECONDS if watched else _IDLE_SECONDS

    def exceeded(self) -> str:
        """Return "memory", "disk", or nothing."""
        if self._memory is not None and time.monotonic() >= self._next_memory:
            began = time.monotonic()
            used = namespace_memory(self._pid)
            # Each instance looks at every process: with hundreds of them, less often.
            self._next_memory = time.monotonic() + 500 * (time.monotonic() - began)
            if used > self._memory:
                return "memory"
        if self._disk is not None and time.monotonic() >= self._next_disk:
            began = time.monotonic()
            used = folder_bytes(self._layer)
            # A big layer is looked at less often: at most a twentieth of one core.
            self._next_disk = time.monotonic() + 20 * (time.monotonic() - began)
            if used > self._disk:
                return "disk"
        return ""


def namespace_members(pid: int) -> list[int]:
    """Return the processes in the pid namespace of `pid`, those that entered it included."""
    try:
        wanted = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return []
    members = []
    for member in all_pids():
        with suppress(OSError):
            if Path(f"/proc/{member}/ns/pid").stat().st_ino == wanted:
                members.append(member)
    return members


def namespace_memory(pid: int) -> int:
    """Return the bytes resident and not backed by files, over the whole namespace."""
    total = 0
    for member in namespace_members(pid):
        with suppress(OSError, ValueError):
            fields = Path(f"/proc/{member}/statm").read_text().split()
            total += max(0, int(fields[1]) - int(fields[2])) * _PAGE
    return total


def folder_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on disk; what cannot be read counts nothing."""
    total = 0
    pending = [str(folder)]
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total
