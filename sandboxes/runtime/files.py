"""Read and write files of a sandbox with the programs that every image has."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Callable, Mapping

from sandboxes.runtime.exceptions import FileFault, FileMissing, OutputTooLarge
from sandboxes.runtime.protocol import ExecResult

READ_SECONDS = 60.0
WRITE_SECONDS = 120.0
_MISSING = 44
_NOT_A_FILE = 45
# A named pipe would block for ever and a device never end: only regular files are read.
_READ = '[ -e "$1" ] || [ -L "$1" ] || exit 44; [ -f "$1" ] || exit 45; exec head -c "$2" -- "$1"'

Execute = Callable[[list[str], bytes, float, int], ExecResult]


def read_file(execute: Execute, path: str, max_bytes: int) -> bytes:
    """Read a regular file; raises FileMissing, FileFault, OutputTooLarge."""
    argv = ["/bin/sh", "-c", _READ, "sh", path, str(max_bytes + 1)]
    result = execute(argv, b"", READ_SECONDS, 2 * max_bytes + 4096)
    if result.exit_code == _MISSING:
        raise FileMissing(f"no file {path} in the sandbox")
    if result.exit_code == _NOT_A_FILE:
        raise FileFault(f"{path} is not a regular file")
    if result.exit_code != 0:
        raise FileFault(f"{path} could not be read: {_why(result)}")
    if len(result.stdout) > max_bytes:
        raise OutputTooLarge(f"{path} is larger than {max_bytes} bytes")
    return result.stdout


def write_files(
    execute: Execute, files: Mapping[str, tuple[bytes, int]], *, root: str = "/"
) -> None:
    """Write files and their missing parents below `root`.

    Raises FileFault, ValueError for a path that is not absolute.
    """
    if not files:
        return
    argv = ["tar", "-x", "-f", "-", "-C", root, "--no-same-owner", "-p"]
    result = execute(argv, pack(files), WRITE_SECONDS, 8192)
    if result.exit_code != 0:
        raise FileFault(f"files could not be written: {_why(result)}")


def pack(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Return a tar archive of absolute paths; raises ValueError for any other path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, (data, mode) in files.items():
            member = tarfile.TarInfo(clean_path(path).lstrip("/"))
            member.size, member.mode = len(data), mode & 0o7777
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def clean_path(path: str) -> str:
    """Return an absolute path without dots; raises ValueError for a relative one or `/`."""
    clean = posixpath.normpath(path)
    if not path.startswith("/") or "\0" in path or clean.strip("/") == "":
        raise ValueError(f"not an absolute path of a file: {path!r}")
    return "/" + clean.lstrip("/")


def _why(result: ExecResult) -> str:
    if result.timed_out:
        return f"no end within {result.duration_seconds:.0f} s"
    return result.stderr.decode("utf-8", "replace").strip()[-1000:] or f"exit {result.exit_code}"
