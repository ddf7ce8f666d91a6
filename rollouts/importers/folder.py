"""Read a folder that somebody else wrote: nothing outside it, nothing huge, nothing odd."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollouts.importers.base import FileContent, TaskRejected

MAX_FILE_BYTES = 10_000_000
MAX_FOLDER_BYTES = 50_000_000
IGNORED = frozenset({"__pycache__", ".DS_Store"})


def read_files(folder: Path, *, inside: Path) -> dict[str, FileContent]:
    """Return the files of a folder by relative path; empty when there is no such folder.

    Modes become 0o755 or 0o644, so that a checkout's umask changes nothing. Links to files are
    read through when they stay `inside`. Raises `TaskRejected`.
    """
    files: dict[str, FileContent] = {}
    if not folder.is_dir():
        return files
    _check_inside(folder, inside)
    total = 0
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - IGNORED)
        for name in folders:
            if Path(directory, name).is_symlink():
                where = Path(directory, name).relative_to(inside)
                raise TaskRejected(f"{where} is a link to a folder; put the folder itself there")
        for name in sorted(set(names) - IGNORED):
            path = Path(directory, name)
            content = _read(path, inside)
            total += len(content.data)
            if total > MAX_FOLDER_BYTES:
                raise TaskRejected(
                    f"{folder.relative_to(inside)} holds more than {MAX_FOLDER_BYTES} bytes; "
                    "put large files into the image"
                )
            files[path.relative_to(folder).as_posix()] = content
    return files


def read_text(path: Path, *, inside: Path) -> str:
    """Return a UTF-8 text with its line ends as they are; raise `TaskRejected`."""
    where = path.relative_to(inside)
    if not path.is_file() and not path.is_symlink():
        raise TaskRejected(f"{where} is missing; add it")
    return decode_text(_read(path, inside).data, str(where))


def decode_text(data: bytes, where: str) -> str:
    """Return UTF-8 text; raise `TaskRejected` that names the first wrong byte."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskRejected(
            f"{where} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    if "\0" in text:
        raise TaskRejected(f"{where} holds a NUL byte; it must be text")
    return text


def _read(path: Path, inside: Path) -> FileContent:
    where = path.relative_to(inside)
    _check_inside(path, inside)
    try:
        status = path.stat()
    except (OSError, RuntimeError) as error:
        raise TaskRejected(f"{where} cannot be read: {error}; mend or remove it") from error
    if not stat.S_ISREG(status.st_mode):
        raise TaskRejected(f"{where} is not a plain file; remove it")
    if status.st_size > MAX_FILE_BYTES:
        raise TaskRejected(
            f"{where} has {status.st_size} bytes, more than {MAX_FILE_BYTES}; "
            "put large files into the image"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskRejected(f"{where} cannot be read: {error}; mend its permissions") from error
    return FileContent(data=data, mode=0o755 if status.st_mode & 0o100 else 0o644)


def _check_inside(path: Path, inside: Path) -> None:
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TaskRejected(
            f"{path.relative_to(inside)} is a link that leads nowhere; remove it"
        ) from error
    if not resolved.is_relative_to(inside.resolve()):
        raise TaskRejected(
            f"{path.relative_to(inside)} is a link out of the task's folder; "
            "put the file itself there"
        )
