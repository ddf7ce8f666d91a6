"""Look up paths in layers that nobody has mounted, as their overlay would show them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_OPAQUE = ("user.overlay.opaque", "user.fuseoverlayfs.opaque")
_WHITEOUT = "user.overlay.whiteout"
_FUSE_WHITEOUT, _FUSE_OPAQUE = ".wh.", ".wh..wh..opq"
_MOST_LINKS = 40  # as the kernel


@dataclass(frozen=True)
class Entry:
    """What one layer holds at a path: `folder`, `link`, `file` or `removed`."""

    kind: str
    path: Path


@dataclass(frozen=True)
class Found:
    """Where a path leads: its absolute name without links, and what is there, topmost first.

    `entries` are folders that are merged, or the one thing that hides all below it; () where
    there is nothing.
    """

    name: str
    entries: tuple[Path, ...]
    through: tuple[str, ...] = ()


def entry(folder: Path, name: str) -> Entry | None:
    """Return what one layer's folder says of a name; None: nothing."""
    path = folder / name
    try:
        status = path.lstat()
    except FileNotFoundError:
        hidden = folder / f"{_FUSE_WHITEOUT}{name}"
        return Entry("removed", hidden) if os.path.lexists(hidden) else None
    if stat.S_ISDIR(status.st_mode):
        return Entry("folder", path)
    if stat.S_ISLNK(status.st_mode):
        return Entry("link", path)
    if _is_whiteout(path, status):
        return Entry("removed", path)
    return Entry("file", path)


def is_opaque(folder: Path) -> bool:
    """Tell whether a folder hides what lower layers hold at its place."""
    if any(_attribute(folder, name) == b"y" for name in _OPAQUE):
        return True
    return os.path.lexists(folder / _FUSE_OPAQUE)


def resolve(layers: Sequence[Path], path: str, *, last: bool = True) -> Found:
    """Follow a path through layers, topmost first, links included; raises OSError for a loop.

    With `last` false a link at the very end is not followed. `through` are the names of all that
    was looked at on the way.
    """
    waiting = [part for part in path.split("/") if part not in ("", ".")][::-1]
    names: list[str] = []
    stack: list[tuple[Path, ...]] = [tuple(layers)]
    through: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            if names:
                names.pop()
                stack.pop()
            continue
        found = _merge(stack[-1], part)
        names.append(part)
        through.append("/" + "/".join(names))
        if found and found[0].kind == "link" and (waiting or last):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, f"too many links on the way to {path}")
            names.pop()
            target = str(found[0].path.readlink())
            if target.startswith("/"):
                names, stack = [], stack[:1]
            waiting += [each for each in target.split("/") if each not in ("", ".")][::-1]
            continue
        stack.append(tuple(each.path for each in found))
    return Found("/" + "/".join(names), stack[-1], tuple(through))


def _merge(folders: Sequence[Path], name: str) -> list[Entry]:
    """Return the folders of that name that are merged, or the one thing that is no folder."""
    found: list[Entry] = []
    for folder in folders:
        if not folder.is_dir() or folder.is_symlink():
            break
        here = entry(folder, name)
        if here is None:
            continue
        if here.kind != "folder":
            return found or ([here] if here.kind != "removed" else [])
        found.append(here)
        if is_opaque(here.path):
            break
    return found


def _is_whiteout(path: Path, status: os.stat_result) -> bool:
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        return _attribute(path, _WHITEOUT) is not None
    return False


def _attribute(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None
