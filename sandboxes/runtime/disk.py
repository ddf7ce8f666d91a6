"""The disk that one instance takes, and the node's own that runs full."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENTRY_BYTES = 4096  # what a file takes at least, an empty one included: an inode is no gift
_LOW_BYTES = 1024**3
_LOW_FILES = 10_000
_LOW_SHARE = 0.02
_LONG_PATH = 3000  # the kernel takes 4095 bytes, of which a name may be 255
PATIENCE_SECONDS = 60.0


@dataclass
class Taken:
    """Hold what a folder takes; `hidden` says that a part of it could not be read."""

    bytes: int = 0
    entries: int = 0
    hidden: bool = False

    @property
    def counted(self) -> int:
        """Return the bytes that a limit is compared with: each entry counts a block at least."""
        return max(self.bytes, self.entries * ENTRY_BYTES)


def measure_folder(folder: Path, *, most: int | None = None) -> Taken:
    """Return what lies below a folder; a sparse file counts its blocks, a hard link once.

    The count ends where it is above `most`.
    """
    taken = Taken()
    _measure(str(folder), taken, set(), most)
    return taken


def _measure(top: str, taken: Taken, linked: set[int], most: int | None) -> None:
    pending = [top]
    while pending and (most is None or taken.counted <= most):
        path = pending.pop()
        try:
            if len(path) > _LONG_PATH:
                _measure_deeper(path, taken, linked, most)
                continue
            with os.scandir(path) as found:
                for entry in found:
                    with suppress(FileNotFoundError):  # it was deleted while we looked
                        if _add(entry.stat(follow_symlinks=False), taken, linked):
                            pending.append(entry.path)
        except PermissionError:
            taken.hidden = True
        except (FileNotFoundError, NotADirectoryError):
            continue


def _measure_deeper(path: str, taken: Taken, linked: set[int], most: int | None) -> None:
    """Go on from a descriptor: a tree may be deeper than the longest path that the kernel takes."""
    opened = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _measure(f"/proc/self/fd/{opened}", taken, linked, most)
    finally:
        os.close(opened)


def _add(state: os.stat_result, taken: Taken, linked: set[int]) -> bool:
    """Count one entry; tells whether it is a folder."""
    folder = stat.S_ISDIR(state.st_mode)
    if state.st_nlink > 1 and not folder:
        if state.st_ino in linked:
            return False
        linked.add(state.st_ino)
    taken.bytes += state.st_blocks * 512
    taken.entries += 1
    return folder


def folder_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on disk; what cannot be read counts nothing."""
    return measure_folder(folder).bytes


def deleted_bytes(processes: Iterable[Path], devices: Collection[int]) -> int:
    """Return the bytes of files that were deleted and are still open, on some file systems."""
    found: dict[int, int] = {}
    for folder in processes:
        with suppress(OSError):
            for number in (folder / "fd").iterdir():
                with suppress(OSError):
                    entry = number.stat()
                    if entry.st_nlink == 0 and entry.st_dev in devices:
                        found[entry.st_ino] = entry.st_blocks * 512
    return sum(found.values())


def is_low(folder: Path) -> bool:
    """Tell whether the file system of a folder has little room left: 1 GiB or 2 per cent."""
    space = os.statvfs(folder)
    low_bytes = min(_LOW_BYTES, _LOW_SHARE * space.f_blocks * space.f_frsize)
    low_files = min(_LOW_FILES, _LOW_SHARE * space.f_files)
    few_files = space.f_files > 0 and space.f_favail < low_files
    return space.f_bavail * space.f_frsize < low_bytes or few_files


def is_emptied(trash: Path) -> bool:
    """Tell whether folders are being deleted, or were given up a minute ago at most."""
    limit = time.time() - PATIENCE_SECONDS
    with suppress(OSError):
        for entry in trash.iterdir():
            with suppress(OSError):
                if entry.lstat().st_ctime > limit:
                    return True
    return False


class Board:
    """Share with the other keepers of this node how much each instance takes.

    The number is overwritten in place in a block that the instance has since its start, so
    that it can be written when the disk is full.
    """

    NAME = "taken"
    _WIDTH = 24

    def __init__(self, home: Path) -> None:
        self._home = home
        self._file = os.open(home / self.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.put(0)

    def put(self, taken: int) -> None:
        """Show the bytes that our instance takes."""
        with suppress(OSError):
            os.pwrite(self._file, str(taken).rjust(self._WIDTH).encode(), 0)

    def is_largest(self, taken: int, instances: Path, since: float) -> bool:
        """Tell whether no other instance takes more; of two that take the same both do.

        What another showed before `since` may have changed: that is waited for, for a minute.
        One that has ended counts until it is stopped: room is expected from it first.
        """
        most = 0
        for file in instances.glob(f"*/{self.NAME}"):
            with suppress(OSError, ValueError):
                if file.stat().st_mtime < since < time.time() < since + PATIENCE_SECONDS:
                    return False
                most = max(most, int(file.read_text()))
        return taken > 0 and taken >= most
