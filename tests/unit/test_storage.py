"""The trajectory store: on disk before its name is there, whole or not at all."""

import os
from pathlib import Path

import pytest
from django.core.files.base import ContentFile

from rollouts.storage import SyncedFileStorage


@pytest.fixture
def storage(tmp_path: Path) -> SyncedFileStorage:
    return SyncedFileStorage(location=tmp_path)


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(
    storage: SyncedFileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    sync, replace = os.fsync, Path.replace

    def watched_sync(descriptor: int) -> None:
        kind = "folder" if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir() else "file"
        happened.append(f"sync {kind}")
        sync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        happened.append("rename")
        assert self.read_bytes() == b"body"
        assert not target.exists()
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)

    name = storage.save("a/b/c.json", ContentFile(b"body"))

    assert happened == ["sync file", "rename", "sync folder"]
    assert (name, (tmp_path / name).read_bytes()) == ("a/b/c.json", b"body")


def test_a_full_disk_leaves_the_old_file_and_no_rest(
    storage: SyncedFileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.save("t.json", ContentFile(b"old"))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.save("t.json", ContentFile(b"new"))

    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["../out.json", "/etc/out.json"])
def test_names_outside_of_the_store_are_refused(storage: SyncedFileStorage, name: str) -> None:
    from django.core.exceptions import SuspiciousFileOperation

    with pytest.raises(SuspiciousFileOperation):
        storage.save(name, ContentFile(b"x"))
