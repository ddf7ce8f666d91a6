"""Look up paths in layers that nobody has mounted, as their overlay would show them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_OPAQUE, _FUSE_OPAQUE_MARK = "user.overlay.opaque", "user.fuseoverlayfs.opaque"
_WHITEOUT = "user.overlay.whiteout"
_FUSE_WHITEOUT, _FUSE_OPAQUE = ".wh.", ".wh..wh..opq"
_MOST_LINKS = 40  # as the kernel
_MOST_STEPS = 2_000


@dataclass(frozen=True)
class Entry:
    """What one layer holds at a path: `folder`, `link`, `file` or `removed`."""

    kind: str
    path: Path


@dataclass(frozen=True)
class Found:
    """Where a path leads: its absolute name without links, and what is there, topmost first.

    `entries` are folders that are merged, or the one thing that hides all below it; () where
    there is nothing. Not `is_sure`: the way leads out of something that no layer holds.
    """

    name: str
    entries: tuple[Path, ...]
    through: tuple[str, ...] = ()
    is_sure: bool = True


def entry(folder: Path, name: str, *, fuse: bool = False) -> Entry | None:
    """Return what one layer's folder says of a name; None: nothing.

    `fuse`: the layer was written by fuse-overlayfs, whose marks are plain files to the kernel's
    overlay, which anybody can make.
    """
    path = folder / name
    try:
        status = path.lstat()
    except FileNotFoundError:
        if not fuse:
            return None
        hidden = folder / f"{_FUSE_WHITEOUT}{name}"
        return Entry("removed", hidden) if os.path.lexists(hidden) else None
    if stat.S_ISDIR(status.st_mode):
        return Entry("folder", path)
    if stat.S_ISLNK(status.st_mode):
        return Entry("link", path)
    if _is_whiteout(path, status):
        return Entry("removed", path)
    return Entry("file", path)


def is_opaque(folder: Path, *, fuse: bool = False) -> bool:
    """Tell whether a folder hides what lower layers hold at its place."""
    if _attribute(folder, _OPAQUE) == b"y":
        return True
    if not fuse:
        return False
    return _attribute(folder, _FUSE_OPAQUE_MARK) == b"y" or os.path.lexists(folder / _FUSE_OPAQUE)


def resolve(
    layers: Sequence[Path],
    path: str,
    *,
    last: bool = True,
    fuse: bool = False,
    steps: int = _MOST_STEPS,
) -> Found:
    """Follow a path through layers, topmost first, links included.

    With `last` false a link at the very end is not followed. `through` are the names of all that
    was looked at on the way. Raises OSError for a loop, and ENAMETOOLONG beyond so many steps.
    """
    waiting = [part for part in path.split("/") if part not in ("", ".")][::-1]
    names: list[str] = []
    stack: list[tuple[Path, ...]] = [tuple(layers)]
    through: list[str] = []
    links = done = 0
    is_sure = True
    while waiting:
        done += 1
        if done > steps:
            raise OSError(errno.ENAMETOOLONG, f"too many steps on the way to {path[:200]}")
        part = waiting.pop()
        if part == "..":
            # Out of what is in no layer: what is mounted there may lead elsewhere.
            is_sure = is_sure and bool(stack[-1])
            if names:
                names.pop()
                stack.pop()
            continue
        found = _merge(stack[-1], part, fuse)
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
    return Found("/" + "/".join(names), stack[-1], tuple(through), is_sure)


def _merge(folders: Sequence[Path], name: str, fuse: bool) -> list[Entry]:
    """Return the folders of that name that are merged, or the one thing that is no folder."""
    found: list[Entry] = []
    for folder in folders:
        if not folder.is_dir() or folder.is_symlink():
            break
        here = entry(folder, name, fuse=fuse)
        if here is None:
            continue
        if here.kind != "folder":
            return found or ([here] if here.kind != "removed" else [])
        found.append(here)
        if is_opaque(here.path, fuse=fuse):
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
