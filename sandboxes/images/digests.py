"""Digests of what is in an image: of one file, or of a whole folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_KINDS = {
    stat.S_IFREG: b"f",
    stat.S_IFDIR: b"d",
    stat.S_IFLNK: b"l",
    stat.S_IFCHR: b"c",
    stat.S_IFBLK: b"b",
    stat.S_IFIFO: b"p",
    stat.S_IFSOCK: b"s",
}


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content, hexadecimal; raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tree_digest(folder: Path) -> tuple[str, int]:
    """Return the sha256 of a folder and the bytes that its files take; raises OSError.

    Of paths, kinds, modes, link targets, device numbers and contents, in the order of the paths'
    bytes; not of times and owners, which differ from node to node.
    """
    total = 0
    digest = hashlib.sha256()
    for path, info in walk(os.fsencode(folder)):
        relative = path[len(os.fsencode(folder)) :]
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), b"?")
        detail = b""
        if kind == b"f":
            with open(path, "rb") as stream:  # noqa: PTH123 (names are bytes here)
                detail = hashlib.file_digest(stream, "sha256").digest()
            total += info.st_blocks * 512
        elif kind == b"l":
            detail = os.readlink(path)  # noqa: PTH115 (names are bytes here)
        elif kind in b"cb":
            detail = b"%d" % info.st_rdev
        mode = b"%o" % stat.S_IMODE(info.st_mode)
        # Lengths before what varies: no two trees give the same bytes.
        digest.update(b"%s %s %d %d\n" % (kind, mode, len(relative), len(detail)))
        digest.update(relative + detail)
    return digest.hexdigest(), total


def tree_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk; raises OSError."""
    return sum(
        info.st_blocks * 512 for _, info in walk(os.fsencode(folder)) if stat.S_ISREG(info.st_mode)
    )


def walk(folder: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield everything below a folder with its own (not its target's) status, in a fixed order."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        info = entry.stat(follow_symlinks=False)
        yield entry.path, info
        if stat.S_ISDIR(info.st_mode):
            yield from walk(entry.path)
