"""Archives from outside: plain files below one folder, and no more than fits."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.importers import archive
from rollouts.importers.archive import UnsafeArchive, is_archive, unpack


def tar(path: Path, *members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as packed:  # type: ignore[call-overload]
        for member in members:
            packed.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return path


def member(
    name: str, size: int = 1, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def zipped(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name.replace("__", "/"), data)
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_is_unpacked_with_the_folder_in_it_as_the_root(tmp_path: Path, mode: str) -> None:
    script = member("tasks/one/run.sh")
    script.mode = 0o755
    path = tar(tmp_path / "a", member("tasks/one/task.toml"), script, mode=mode)
    assert is_archive(path)
    root = unpack(path, tmp_path / "out")
    assert root == tmp_path / "out" / "tasks"
    assert (root / "one/run.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "one/task.toml").read_bytes() == b"x"


def test_a_zip_of_one_task_is_read_from_outside_it(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", **{"one/task.toml": b"", "one/instruction.md": b"x"})
    assert is_archive(path)
    assert unpack(path, tmp_path / "out") == tmp_path / "out"


def encrypted(path: Path) -> Path:
    zipped(path, a=b"x")
    data = bytearray(path.read_bytes())
    data[6] |= 1
    place = data.index(b"PK\x01\x02")
    data[place + 8] |= 1
    path.write_bytes(data)
    return path


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "up": (lambda p: tar(p, member("../x")), "leads out of the archive"),
    "absolute": (lambda p: tar(p, member("/x")), "leads out of the archive"),
    "zip up": (lambda p: zipped(p, **{"a/../../x": b""}), "leads out of the archive"),
    "windows": (lambda p: zipped(p, **{"..\\x": b""}), "leads out of the archive"),
    "link": (lambda p: tar(p, member("a", 0, tarfile.SYMTYPE, "/etc")), "is no plain file"),
    "hard link": (lambda p: tar(p, member("a", 0, tarfile.LNKTYPE, "/etc")), "is no plain file"),
    "device": (lambda p: tar(p, member("a", 0, tarfile.CHRTYPE)), "is no plain file"),
    "twice": (lambda p: tar(p, member("a"), member("a")), "stands twice"),
    "file and folder": (lambda p: tar(p, member("a"), member("a/b")), "both file and folder"),
    "encrypted": (encrypted, "cannot be read"),
    "bomb": (lambda p: tar(p, member("a", 5_000_000)), "more than 100000 bytes unpacked"),
    "many": (lambda p: tar(p, *[member(str(n)) for n in range(6)]), "more than 5 files"),
    "cut": (
        lambda p: cut(zipped(p, a=b"x" * 100), 60),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_plain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 5)
    monkeypatch.setattr(archive, "FREE_BYTES", 100_000)
    monkeypatch.setattr(archive, "MAX_RATIO", 1)
    make, reason = BAD[name]
    path = make(tmp_path / "bad")
    with pytest.raises(UnsafeArchive, match=reason):
        unpack(path, tmp_path / "out" / "in")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "out" / "x").exists()
