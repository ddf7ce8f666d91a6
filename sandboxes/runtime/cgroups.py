"""One control group per instance, of version 2 or 1, below a folder that was delegated.

The limits sit on `FOLDER/NAME` and the processes one level below, in `FOLDER/NAME/in`: a
sandbox belongs to the account that owns both, and the level is what keeps it from its own
limits, because a cgroup namespace that it may make begins at `in`.

Files and formats: https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CONTROLLERS = ("memory", "pids", "cpu")
SERVICE = "_service"  # where the spawner itself lives in version 2; no sandbox has that name
_INNER = "in"
_PERIOD_MICROSECONDS = 100_000
_LEAST_QUOTA_MICROSECONDS = 1000  # the kernel takes no less
_EMPTY_SECONDS = 5.0
_POLL_SECONDS = 0.005


class Group:
    """Hold one instance in its groups; a controller that was not delegated is missing."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = {kind: Path(folder) for kind, folder in folders.items()}
        self._event: int | None = None

    @classmethod
    def make(cls, delegated: Mapping[str, str], name: str) -> Group:
        """Make the groups of an instance below the delegated folders, without limits yet.

        A folder that cannot be used, because it is gone or full, is left out: the watchdog
        keeps that limit then.
        """
        made: dict[str, str] = {}
        for kind, parent in delegated.items():
            folder = Path(parent) / name
            with suppress(OSError):
                (folder / _INNER).mkdir(parents=True, exist_ok=folder in map(Path, made.values()))
                made[kind] = str(folder)
        group = cls(made)
        group._watch_memory()
        return group

    def __contains__(self, kind: str) -> bool:
        return kind in self._folders

    @property
    def folders(self) -> dict[str, str]:
        """Return the groups by controller, for the instance's record."""
        return {kind: str(folder) for kind, folder in self._folders.items()}

    @property
    def descriptors(self) -> list[int]:
        """Return what becomes readable when memory ran out, for a poll; version 1 only.

        In version 2 the kernel ends the whole group, which the instance's end shows.
        """
        return [] if self._event is None else [self._event]

    @property
    def ends_itself(self) -> bool:
        """Tell whether the kernel ends the whole instance when memory runs out (version 2)."""
        folder = self._folders.get("memory")
        return folder is not None and (folder / "memory.oom.group").exists()

    def limit(self, limits: Mapping[str, Any], *, resting_tasks: int) -> None:
        """Set the limits, those of None included; raises OSError.

        `resting_tasks` are those of the engine itself, which come on top of `processes`.
        EBUSY says that the instance holds more memory already than it may.
        """
        if "memory" in self._folders:
            self._limit_memory(limits.get("memory_bytes"))
        if "pids" in self._folders:
            most = limits.get("processes")
            self._write("pids", "pids.max", "max" if most is None else str(most + resting_tasks))
        if "cpu" in self._folders:
            self._limit_cpus(limits.get("cpus"))

    def members(self) -> list[int]:
        """Return the processes of the instance, as this process numbers them."""
        for folder in self._folders.values():
            return [pid for inner in _below(folder) for pid in _processes(inner)]
        return []

    def ran_out_of_memory(self) -> bool:
        """Tell whether the kernel ended a process because the memory limit was met."""
        folder = self._folders.get("memory")
        if folder is None:
            return False
        if self._event is not None:
            with suppress(BlockingIOError):
                return os.eventfd_read(self._event) > 0
            return False
        unified = (folder / "memory.events").exists()
        file = folder / "memory.events" if unified else folder / _INNER / "memory.oom_control"
        with suppress(OSError):
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts.get("oom_kill", 0)) > 0
        return False

    def _watch_memory(self) -> None:
        """Ask version 1 to tell us; a sandbox may lower a limit of its own below ours unheard."""
        folder = self._folders.get("memory")
        if folder is None or not (folder / "cgroup.event_control").exists():
            return
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        watched = os.open(folder / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._write("memory", "cgroup.event_control", f"{event} {watched}")
            self._event = event
        except OSError:
            os.close(event)
        finally:
            os.close(watched)

    def _limit_memory(self, most: int | None) -> None:
        folder = self._folders["memory"]
        if (folder / "memory.max").exists():
            self._write("memory", "memory.max", "max" if most is None else str(most))
            with suppress(OSError):  # a kernel without swap accounting
                self._write("memory", "memory.swap.max", "max" if most is None else "0")
            self._write("memory", "memory.oom.group", "1")
            return
        # The limit with swap must never be below the one without: the order depends on which
        # way they change, so each is tried before the other.
        text = "-1" if most is None else str(most)
        for _ in range(2):
            with suppress(OSError):
                self._write("memory", "memory.memsw.limit_in_bytes", text)
            with suppress(OSError):
                self._write("memory", "memory.limit_in_bytes", text)
        self._write("memory", "memory.limit_in_bytes", text)

    def _limit_cpus(self, cpus: float | None) -> None:
        quota = max(_LEAST_QUOTA_MICROSECONDS, int((cpus or 0) * _PERIOD_MICROSECONDS))
        if (self._folders["cpu"] / "cpu.max").exists():
            first = "max" if cpus is None else str(quota)
            self._write("cpu", "cpu.max", f"{first} {_PERIOD_MICROSECONDS}")
        else:
            self._write("cpu", "cpu.cfs_period_us", str(_PERIOD_MICROSECONDS))
            self._write("cpu", "cpu.cfs_quota_us", "-1" if cpus is None else str(quota))

    def _write(self, kind: str, name: str, text: str) -> None:
        _write(self._folders[kind] / name, text)


def entrances(folders: Mapping[str, str]) -> list[str]:
    """Return the files that a process writes 0 to, to enter the groups of an instance."""
    return [f"{folder}/{_INNER}/cgroup.procs" for folder in sorted(set(folders.values()))]


def enter(files: Iterable[str]) -> None:
    """Move this process into groups; raises OSError."""
    for file in files:
        _write(Path(file), "0")


def remove(folders: Mapping[str, str]) -> bool:
    """End what is left in an instance's groups and remove them; tells whether they are gone."""
    left = [Path(folder) for folder in sorted(set(folders.values())) if Path(folder).exists()]
    deadline = time.monotonic() + _EMPTY_SECONDS
    while left:
        left = [folder for folder in left if not _remove(folder)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return not left


def sweep(delegated: Mapping[str, str], used: Callable[[], Collection[str]]) -> int:
    """Remove the groups below the delegated folders whose names are not used; returns how many.

    `used` is asked after the groups were listed, since a name is taken before its group is made,
    and once more for what is left: a folder that is renamed meanwhile may escape one look.
    """
    parents = [Path(parent) for parent in sorted(set(delegated.values()))]
    found = [group for parent in parents for group in _children(parent) if group.name != SERVICE]
    for _ in range(2):
        names = used() if found else ()
        found = [group for group in found if group.name not in names]
    return sum(remove({"": str(group)}) for group in found)


def _remove(folder: Path) -> bool:
    kill = folder / "cgroup.kill"
    if kill.exists():
        with suppress(OSError):
            _write(kill, "1")
    inner = _below(folder)
    for group in inner:
        for pid in _processes(group):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    for group in reversed(inner):
        with suppress(OSError):  # busy until its last process is collected
            group.rmdir()
    return not folder.exists()


def _below(folder: Path) -> list[Path]:
    """Return a group and those below it, parents first."""
    found = [folder]
    for group in found:  # grows while it is read: no recursion, however deep it goes
        found.extend(_children(group))
    return found


def _children(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _processes(group: Path) -> list[int]:
    """Return the pids in one group; 0 stands for one that this process cannot see."""
    with suppress(OSError):
        return [int(line) for line in (group / "cgroup.procs").read_text().split() if line != "0"]
    return []


def _write(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
