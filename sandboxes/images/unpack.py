"""The unpacked form of an image, which sandboxes start from: out of a SIF, or a copied folder."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxes.runtime.exceptions import ImageUnusable
from sandboxes.runtime.sif import check_complete, find_root_partition

META = ".singularity.d"
_ACTIONS = ("exec", "run", "shell", "start", "test")
_NOTED = 5
_DAY = "org.label-schema.build-date"
# unsquashfs(1): 1 is fatal; 2 says that something of no consequence to us was left out, such as
# device nodes, which an ordinary user cannot make.
_LEFT_OUT = 2

Run = Callable[[Sequence[str]], tuple[int, str]]


def unpack_sif(sif: Path, part: Path, *, unsquashfs: str, run: Run) -> str:
    """Unpack a SIF's root file system into `part`; returns what was left out, for people.

    Raises ImageUnusable, and ImageDiskFull through `run`.
    """
    try:
        partition = find_root_partition(sif)
        check_complete(sif, partition)
    except PermissionError:
        raise ImageUnusable(f"the sandbox account cannot read {sif}") from None
    code, said = run(
        [
            *(unsquashfs, "-no-progress", "-quiet", "-no-xattrs", "-processors", "2"),
            *("-offset", str(partition.offset), "-dest", str(part), str(sif)),
        ]
    )
    if code not in (0, _LEFT_OUT):
        raise ImageUnusable(f"{sif} could not be unpacked: {said[-1000:].strip() or code}")
    if not _is_folder(part / META):
        raise ImageUnusable(f"{sif} holds no {META}: build it with apptainer or singularity")
    open_folders(part)
    return "device nodes were left out" if code == _LEFT_OUT else ""


def copy_rootfs(source: Path, part: Path) -> str:
    """Copy a root file system for the account, and add what an image needs; the source stays.

    Returns what could not be copied, for people. Raises ImageUnusable, OSError.
    """
    if not os.access(source, os.R_OK | os.X_OK):
        raise ImageUnusable(f"the sandbox account cannot read {source}")
    if not has_shell(source):
        raise ImageUnusable(f"{source} is no root file system: it has no bin/sh")
    left_out = _copy(os.fsencode(source), os.fsencode(part))
    add_skeleton(part)
    if not left_out:
        return ""
    shown = ", ".join(os.fsdecode(path) for path in left_out[:_NOTED])
    more = f" and {len(left_out) - _NOTED} more" if len(left_out) > _NOTED else ""
    return f"left out, since the sandbox account cannot read or make them: {shown}{more}"


def has_shell(root: Path) -> bool:
    """Tell whether a folder is a root file system: its links may lead anywhere in there."""
    return any(os.path.lexists(root / path) for path in ("bin/sh", "usr/bin/sh"))


def is_complete(folder: Path, uid: int, gid: int) -> bool:
    """Tell whether a folder carries sandboxes of that owner where it is."""
    try:
        owner = folder.stat()
        return (folder / META).is_dir() and (owner.st_uid, owner.st_gid) == (uid, gid)
    except OSError:
        return False


def add_skeleton(root: Path) -> None:
    """Add the folder that `instance start` asks for, and mount points; what is there stays.

    Raises ImageUnusable when a link stands where a folder must be: it could lead out.
    """
    for name in ("proc", "sys", "dev", "tmp", "root", "app", "var", "var/tmp", "etc"):
        _make_folder(root / name, mode=0o1777 if name in ("tmp", "var/tmp") else 0o755)
    meta = root / META
    for folder in (meta, meta / "actions", meta / "env", meta / "libs"):
        if folder.is_symlink():
            raise ImageUnusable(f"{folder.relative_to(root)} is a link")
        folder.mkdir(exist_ok=True)
    scripts = {f"actions/{name}": '#!/bin/sh\nexec "$@"\n' for name in _ACTIONS}
    scripts |= {
        "runscript": '#!/bin/sh\nexec /bin/sh "$@"\n',
        "startscript": "#!/bin/sh\n",
        "env/90-environment.sh": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        if not os.path.lexists(meta / name):
            (meta / name).write_text(text)
            (meta / name).chmod(0o755)
    if not os.path.lexists(meta / "labels.json"):
        (meta / "labels.json").write_text("{}\n")


def forget_day(root: Path) -> None:
    """Drop the day of the conversion from an image's labels: its content is the same every day."""
    path = root / META / "labels.json"
    if path.is_symlink() or not path.is_file():
        return
    try:
        labels = json.loads(path.read_bytes())
    except ValueError:
        return
    if isinstance(labels, dict) and labels.pop(_DAY, None) is not None:
        path.write_text(json.dumps(labels, indent=1, sort_keys=True) + "\n")


def open_folders(root: Path) -> None:
    """Let the owner enter and change every folder: overlays and removals want that."""
    root.chmod(stat.S_IMODE(root.stat().st_mode) | 0o700)
    for folder, names, _ in os.walk(os.fsencode(root)):
        for name in names:  # before they are walked
            path = os.path.join(folder, name)  # noqa: PTH118 (names are bytes here)
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                os.chmod(path, stat.S_IMODE(mode) | 0o700)  # noqa: PTH101


def _make_folder(path: Path, *, mode: int) -> None:
    if not os.path.lexists(path):
        path.mkdir()
        path.chmod(mode)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _copy(source: bytes, target: bytes) -> list[bytes]:
    """Copy folders, files, links and hard links; returns the paths that were left out."""
    left_out: list[bytes] = []
    links: dict[tuple[int, int], bytes] = {}
    _copy_folder(source, target)
    pending = [source]
    while pending:
        try:
            entries = sorted(os.scandir(pending.pop()), key=lambda entry: entry.name)
        except PermissionError as fault:
            left_out.append(_within(os.fsencode(fault.filename), source))
            continue
        for entry in entries:
            path, info = entry.path, entry.stat(follow_symlinks=False)
            copy = target + path[len(source) :]
            if stat.S_ISDIR(info.st_mode):
                _copy_folder(path, copy)
                pending.append(path)
            elif stat.S_ISLNK(info.st_mode):
                os.symlink(os.readlink(path), copy)  # noqa: PTH115, PTH211
            elif not _copy_file(path, copy, info, links):
                left_out.append(_within(path, source))
    return left_out


def _copy_folder(path: bytes, copy: bytes) -> None:
    os.mkdir(copy)  # noqa: PTH102
    os.chmod(copy, stat.S_IMODE(os.lstat(path).st_mode) | 0o700)  # noqa: PTH101


def _copy_file(
    path: bytes, copy: bytes, info: os.stat_result, links: dict[tuple[int, int], bytes]
) -> bool:
    if not stat.S_ISREG(info.st_mode):
        return False
    first = links.get((info.st_dev, info.st_ino))
    if first is not None:
        os.link(first, copy)
        return True
    try:
        shutil.copyfile(path, copy, follow_symlinks=False)
    except PermissionError:
        return False
    os.chmod(copy, stat.S_IMODE(info.st_mode))  # noqa: PTH101
    if info.st_nlink > 1:
        links[info.st_dev, info.st_ino] = copy
    return True


def _within(path: bytes, root: bytes) -> bytes:
    return path[len(root) :] or b"/"
