"""Compare one instance with its limits, as often as its distance from them asks for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sandboxes.runtime.cgroups import Group
from sandboxes.runtime.confine import raise_score
from sandboxes.runtime.disk import (
    PATIENCE_SECONDS,
    Board,
    deleted_bytes,
    folder_bytes,
    is_emptied,
    is_low,
    measure_folder,
)
from sandboxes.runtime.inside import View, namespace_members
from sandboxes.runtime.memory import Memory, memory_mounts

__all__ = ["OWN_LIMITS", "EndNote", "Usage", "folder_bytes", "namespace_members"]

# Why a keeper ends an instance: a limit of its own, or else "node_disk" (the node's disk runs
# full) and "watchdog" (the keeper failed), which are no fault of what runs in it.
OWN_LIMITS = frozenset({"lifetime", "memory", "disk"})
_MEMORY_SPEED = 4 * 1024**3  # bytes a second that a few cores fill at most
_DISK_SPEED = 1024**3
_MEMORY_GRAIN = 256 * 1024**2  # a node can lose as much between two looks
_DISK_GRAIN = 128 * 1024**2
_LONGEST_SECONDS = 5.0
_NODE_SECONDS = 2.0  # one statvfs, for every instance
_LOW_SECONDS = 0.5
_EVENT_SECONDS = 0.5  # where the kernel does not tell us that memory ran out
_SHARE = 20  # a look may take a twentieth of one core


class EndNote:
    """Write down which limit ended an instance, on a full disk too.

    Its block is taken at the start and overwritten; the rename shows all of it or nothing.
    """

    _WIDTH = 128

    def __init__(self, home: Path) -> None:
        self._home = home
        self._file = os.open(home / ".ended", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._file, b" " * self._WIDTH)

    def write(self, reason: str) -> None:
        """Show the reason from now on."""
        text = json.dumps({"reason": reason, "at": time.time()})
        with suppress(OSError):
            os.pwrite(self._file, text.ljust(self._WIDTH).encode(), 0)
            (self._home / ".ended").rename(self._home / "ended.json")


class _Watch(Protocol):
    def look(self) -> tuple[str, float]:
        """Return the limit that was exceeded, or "", and the seconds until the next look."""
        ...


class Usage:
    """Compare an instance with its limits; a limit of None is not looked at.

    `home` is the instance's folder and `instances` that of all. Ends with "memory", "disk",
    or "node_disk": the node's disk is nearly full and no instance takes more than this one.
    """

    def __init__(
        self,
        *,
        home: Path,
        instances: Path,
        limits: Mapping[str, Any],
        group: Group,
        view: View,
        pid: int,
    ) -> None:
        self._group = group
        layer = _Layer(home, view, pid)
        self._watches: list[_Watch] = [_Scores(view), _NodeDisk(layer, home, instances)]
        if limits.get("disk_bytes") is not None:
            self._watches.append(_Disk(layer, limits["disk_bytes"]))
        most = limits.get("memory_bytes")
        if most is not None and "memory" in group:
            self._watches.append(_GroupMemory(group))
        elif most is not None:
            self._watches.append(_SeenMemory(view, most))
        self._due = [0.0] * len(self._watches)

    @property
    def interval_seconds(self) -> float:
        """Return how long to wait for the next look."""
        return max(0.0, min(self._due) - time.monotonic())

    def exceeded(self) -> str:
        """Return the limit that was exceeded, or nothing."""
        if self._group.ran_out_of_memory():
            return "memory"
        for number, watch in enumerate(self._watches):
            if time.monotonic() < self._due[number]:
                continue
            began = _used_seconds()
            reason, pause = watch.look()
            if reason:
                return reason
            cost = _SHARE * (_used_seconds() - began)
            self._due[number] = time.monotonic() + max(pause, cost)
        return ""


def _used_seconds() -> float:
    """Return the processor time of this process and of those that it has collected."""
    spent = os.times()
    return time.process_time() + spent.children_user + spent.children_system


class _GroupMemory:
    def __init__(self, group: Group) -> None:
        told = bool(group.descriptors) or group.ends_itself
        self._pause = _LONGEST_SECONDS if told else _EVENT_SECONDS

    def look(self) -> tuple[str, float]:
        return "", self._pause  # `exceeded` asks the group at every look


class _SeenMemory:
    def __init__(self, view: View, most: int) -> None:
        self._most = most
        own = frozenset(device for device, _, _ in memory_mounts(Path("/proc/self/mountinfo")))
        self._memory = Memory(view, foreign=own)

    def look(self) -> tuple[str, float]:
        above, held = self._memory.above(self._most)
        room = max(self._most - held, _MEMORY_GRAIN)
        return "memory" if above else "", min(_LONGEST_SECONDS, room / _MEMORY_SPEED)


class _Layer:
    """Measure what one instance takes of the disk, what it hid and deleted included."""

    def __init__(self, home: Path, view: View, pid: int) -> None:
        self._folder, self._view = home / "upper", view
        self._devices = {home.stat().st_dev}
        with suppress(OSError):
            self._devices.add(Path(f"/proc/{pid}/root/").stat().st_dev)

    def taken(self, most: int | None = None) -> int:
        """Return the bytes that are counted; where it is above `most`, no more than that."""
        found = measure_folder(self._folder, most=most)
        counted = found.counted
        if found.hidden:
            inside = self._view.run_inside(lambda: measure_folder(self._folder, most=most).counted)
            counted = max(counted, int(inside or 0))
        return counted + deleted_bytes(self._view.processes(), self._devices)


class _Disk:
    def __init__(self, layer: _Layer, most: int) -> None:
        self._layer, self._most = layer, most

    def look(self) -> tuple[str, float]:
        taken = self._layer.taken(self._most)
        room = max(self._most - taken, _DISK_GRAIN)
        return "disk" if taken > self._most else "", min(_LONGEST_SECONDS, room / _DISK_SPEED)


class _NodeDisk:
    """End the instance that takes the most while the node's disk is nearly full."""

    def __init__(self, layer: _Layer, home: Path, instances: Path) -> None:
        self._layer, self._home, self._instances = layer, home, instances
        self._board = Board(home)
        self._low_since: float | None = None
        self._since: float | None = None

    def look(self) -> tuple[str, float]:
        low, now = is_low(self._home), time.time()
        self._low_since = (self._low_since or now) if low else None
        # Folders that are being deleted make room, and end the need for it; where some always
        # are, that is no reason to wait for ever.
        waits = self._low_since is not None and now - self._low_since < PATIENCE_SECONDS
        if not low or (waits and is_emptied(self._instances.parent / "trash")):
            self._since = None
            return "", _NODE_SECONDS
        self._since = self._since or now
        taken = self._layer.taken()
        self._board.put(taken)
        largest = self._board.is_largest(taken, self._instances, self._since)
        return "node_disk" if largest else "", _LOW_SECONDS


class _Scores:
    """A process may lower its OOM score again where no privilege forbids it: undo that."""

    def __init__(self, view: View) -> None:
        self._view = view

    def look(self) -> tuple[str, float]:
        for folder in self._view.processes():
            raise_score(folder)
        return "", _LONGEST_SECONDS
