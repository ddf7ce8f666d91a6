"""The memory of one instance where no control group counts it, from what /proc says."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxes.runtime.disk import folder_bytes
from sandboxes.runtime.inside import View

_KIB = 1024
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a blank


@dataclass
class Memory:
    """Count what an instance holds: private pages, shared ones, and files kept in memory.

    Files in memory are those of every tmpfs and ramfs that one of its processes has mounted,
    System V segments, and open memfds. The cheap sum counts a shared page once for each
    process, so it is an upper bound; only when that is above the limit the proportional sums
    are read, which cost a walk over the page tables.
    """

    view: View
    foreign: frozenset[str] = frozenset()  # devices of mounts that are the node's own

    def above(self, limit: int) -> tuple[bool, int]:
        """Tell whether the limit is exceeded, and how many bytes are held at most."""
        folders = list(self.view.processes())
        private, shared = 0, 0
        for folder in folders:
            one = _read_kib(folder / "status", ("RssAnon", "RssShmem"))
            private, shared = private + one["RssAnon"], shared + one["RssShmem"]
        files = self._file_bytes(folders) + self.view.segment_bytes()
        most = private + shared + files
        if most <= limit:
            return False, most
        private = shared = 0
        for folder in folders:
            one = _read_kib(folder / "smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
            private, shared = private + one["Pss_Anon"], shared + one["Pss_Shmem"]
        exact = private + max(shared, files)  # what is mapped is, for the most part, in files
        return exact > limit, exact

    def _file_bytes(self, folders: list[Path]) -> int:
        found: dict[str, int] = {}
        seen: set[Path] = set()
        for folder in folders:
            with suppress(OSError):
                space = (folder / "ns" / "mnt").readlink()
                if space not in seen:
                    seen.add(space)
                    self._add_mounts(folder, found)
        return sum(found.values()) + sum(_memfds(folders).values())

    def _add_mounts(self, folder: Path, found: dict[str, int]) -> None:
        """Add the memory file systems of one mount namespace, each once."""
        for device, kind, place in memory_mounts(folder / "mountinfo"):
            if device in self.foreign or device in found:
                continue
            path = Path(f"{folder}/root{place}")
            with suppress(OSError):
                if kind == "ramfs":
                    found[device] = folder_bytes(path)
                else:
                    space = os.statvfs(path)
                    found[device] = (space.f_blocks - space.f_bfree) * space.f_frsize


def memory_mounts(table: Path) -> list[tuple[str, str, str]]:
    """Return device, type and place of the file systems in a mountinfo that live in memory."""
    found = []
    with suppress(OSError), table.open(errors="replace") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            kind = after.split(" ", 1)[0]
            if kind in ("tmpfs", "ramfs"):
                fields = before.split(" ")
                found.append((fields[2], kind, _OCTAL.sub(_character, fields[4])))
    return found


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _memfds(folders: list[Path]) -> dict[int, int]:
    """Return the bytes of open memfds by inode: no page table need show them."""
    device = _memfd_device()
    found: dict[int, int] = {}
    for folder in folders:
        with suppress(OSError):
            for number in (folder / "fd").iterdir():
                with suppress(OSError):
                    entry = number.stat()
                    if entry.st_dev == device and stat.S_ISREG(entry.st_mode):
                        found[entry.st_ino] = entry.st_blocks * 512
    return found


def _memfd_device() -> int:
    descriptor = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _read_kib(file: Path, keys: tuple[str, ...]) -> dict[str, int]:
    """Return lines `Key: N kB` in bytes; what is missing is 0, as for a process that ended."""
    found = dict.fromkeys(keys, 0)
    with suppress(OSError, ValueError), file.open(errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key in found:
                found[key] = int(value.split()[0]) * _KIB
    return found
