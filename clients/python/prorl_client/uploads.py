"""Files on their way to the service; a folder goes as one archive."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sendable(path: Path) -> Iterator[Path]:
    """Yield the file, or for a folder a compressed archive of it, which is deleted afterwards.

    Hidden folders such as `.git` stay behind. Raises OSError.
    """
    if not path.is_dir():
        path.stat()
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="prorl-upload-") as folder:
        archive = Path(folder) / "tasks.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
            for entry in sorted(path.iterdir()):
                if not entry.name.startswith("."):
                    packed.add(entry, arcname=entry.name)
        yield archive
