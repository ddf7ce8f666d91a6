"""Storage of trajectories: a local folder whose files are on disk before their name is there."""

import os
from pathlib import Path
from typing import Any

from django.core.files.base import File
from django.core.files.storage import FileSystemStorage
from django.utils.deconstruct import deconstructible


@deconstructible
class SyncedFileStorage(FileSystemStorage):
    """Write to a temporary name, sync, rename, sync the folder; an existing name is replaced."""

    def get_available_name(self, name: str, max_length: int | None = None) -> str:  # noqa: ARG002
        """Return the name as it is: names are unique by rollout and episode."""
        return name

    def _save(self, name: str, content: "File[Any]") -> str:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{id(content):x}")
        try:
            with temporary.open("wb") as stream:
                for chunk in content.chunks():
                    stream.write(chunk.encode() if isinstance(chunk, str) else chunk)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
        return name


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def trajectory_storage() -> Any:
    """Return the storage that settings name `trajectories`."""
    from django.core.files.storage import storages

    return storages["trajectories"]
