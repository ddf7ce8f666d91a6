"""Unpack an archive that somebody sent: plain files below one folder, and no more than fits."""

from __future__ import annotations

import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

MAX_BYTES = 5_000_000_000
MAX_FILES = 500_000
MAX_RATIO = 200  # what a zip bomb is told by, beyond the first megabytes
FREE_BYTES = 50_000_000
_BROKEN = (
    *(zipfile.BadZipFile, tarfile.TarError, EOFError, NotImplementedError),
    *(lzma.LZMAError, zlib.error),
)
_CHUNK = 1024 * 1024
_TAR_HEADS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")


class UnsafeArchive(Exception):
    """Say why an archive is not unpacked, and what to do."""

    code: ClassVar[str] = "import.archive_unsafe"


@dataclass(frozen=True)
class _Member:
    """One plain file of an archive."""

    name: str
    size: int
    mode: int
    stream: IO[bytes]


def is_archive(path: Path) -> bool:
    """Tell whether a file is a zip, a tar or a compressed tar."""
    with path.open("rb") as stream:
        head = stream.read(512)
    if head.startswith(b"PK\x03\x04"):
        return True
    if head[257:262] == b"ustar":
        return True
    return head.startswith(_TAR_HEADS) and _is_tar(path)


def _is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, OSError, lzma.LZMAError, zlib.error):  # compressed, and not whole
        return False


def unpack(archive: Path, folder: Path, *, max_bytes: int = MAX_BYTES) -> Path:
    """Unpack an archive below a new folder; return where its tasks lie.

    Links, devices, absolute names and `..` are refused, as are archives that grow beyond all
    measure. An archive of one folder is read inside it. Raises `UnsafeArchive`.
    """
    folder.mkdir(parents=True)
    limit = min(max_bytes, max(FREE_BYTES, archive.stat().st_size * MAX_RATIO))
    written, count = 0, 0
    try:
        for member in _members(archive):
            count += 1
            if count > MAX_FILES:
                raise UnsafeArchive(f"the archive has more than {MAX_FILES} files; split it")
            target = folder / _inside(member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            written = _write(member, target, written, limit)
    except _BROKEN as fault:
        raise UnsafeArchive(f"the archive cannot be read: {fault}; pack it anew") from fault
    except (RuntimeError, ValueError) as fault:  # encrypted, or a name that no file can have
        raise UnsafeArchive(f"the archive cannot be read: {fault}; pack it anew") from fault
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as fault:
        raise UnsafeArchive(f"a name in the archive is both file and folder: {fault}") from fault
    return _root(folder)


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive) and not _is_tar(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                if info.is_dir():
                    continue
                if kind not in (0, stat.S_IFREG):
                    raise UnsafeArchive(f"{info.filename!r} is no plain file; pack files only")
                with packed.open(info) as stream:
                    yield _Member(info.filename, info.file_size, info.external_attr >> 16, stream)
        return
    with tarfile.open(archive, "r|*") as packed_tar:
        for entry in packed_tar:
            if entry.isdir():
                continue
            stream_of = packed_tar.extractfile(entry) if entry.isreg() else None
            if stream_of is None:
                raise UnsafeArchive(f"{entry.name!r} is no plain file; pack files only")
            yield _Member(entry.name, entry.size, entry.mode, stream_of)


def _inside(name: str) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise UnsafeArchive(f"{name!r} leads out of the archive; pack relative names")
    return Path(*path.parts)


def _write(member: _Member, target: Path, written: int, limit: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(target, flags, 0o755 if member.mode & 0o100 else 0o644)
    except FileExistsError:
        raise UnsafeArchive(f"{member.name!r} stands twice in the archive; pack it anew") from None
    with os.fdopen(descriptor, "wb") as out:
        while chunk := member.stream.read(_CHUNK):
            written += len(chunk)
            if written > limit:
                raise UnsafeArchive(f"the archive holds more than {limit} bytes unpacked; split it")
            out.write(chunk)
    return written


def _root(folder: Path) -> Path:
    """Return the folder's only folder, where there is nothing else, or itself."""
    entries = [entry for entry in folder.iterdir() if entry.name != "__MACOSX"]
    if len(entries) != 1:
        return folder
    only = entries[0]
    has_task = any((only / name).is_file() for name in ("task.toml", "task.yaml"))
    return folder if has_task or (only.is_dir() is False and only.name != "registry.json") else only
