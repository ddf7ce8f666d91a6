"""The images of a node: one folder per content, found by what was asked for, evicted by use.

Below `root`: `images/KEY/` is an unpacked image, `images/KEY.json` says what it is (its time of
change is its last use), `images/work-*` are builds at work; `image-index/asked/REQUEST.json`
leads from what was asked for to a KEY, `image-index/locks/` holds locks. KEY is the digest of the
content: a SIF's sha256 where one came as it is, the folder's otherwise.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from sandboxes.runtime.layout import read_record, write_record
from sandboxes.runtime.locks import try_lock

KEY_PATTERN = re.compile(r"[0-9a-f]{64}")
# An image that was just found may be about to carry a sandbox that is not there yet.
GRACE_SECONDS = 900.0
WORK = "work-"
HELD = ".held"


@dataclass(frozen=True, kw_only=True)
class CachedImage:
    """Hold an image on this node: where it is, the digest of its content, its sizes in bytes.

    `folder` is what sandboxes start from. `sif_bytes` is 0 where no SIF came. `note` is what an
    operator should know of how it was made. `digest` is empty for a folder used where it is.
    """

    folder: str
    digest: str = ""
    image_bytes: int = 0
    sif_bytes: int = 0
    note: str = ""
    reused: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Self:
        """Build from `asdict`'s values; raises KeyError, ValueError."""
        return cls(
            folder=str(data["folder"]),
            digest=str(data["digest"]),
            image_bytes=int(str(data["image_bytes"])),
            sif_bytes=int(str(data["sif_bytes"])),
            note=str(data["note"]),
            reused=bool(data["reused"]),
        )


class ImageCache:
    """Look after the images below one root; usable from many processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._index = root / "image-index"
        self.folder = root / "images"

    def make(self) -> None:
        """Make the folders that are missing; run as the account."""
        for folder in (self.folder, self._index / "asked", self._index / "locks"):
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, request: str) -> CachedImage | None:
        """Return the image that was made for a request, and note that it was used now."""
        record = read_record(self._asked(request))
        return self.get(str(record.get("key"))) if record else None

    def get(self, key: str) -> CachedImage | None:
        """Return the image of a content, and note that it was used now."""
        if not KEY_PATTERN.fullmatch(key):
            return None
        record = read_record(self.folder / f"{key}.json")
        if record is None or not (self.folder / key).is_dir():
            return None
        with suppress(OSError):  # another account's process may look it up
            os.utime(self.folder / f"{key}.json")
        try:
            return CachedImage.from_dict(record)
        except (KeyError, ValueError):
            return None

    def asked_at(self, request: str) -> float:
        """Return when a request was last led to a content, 0.0 for never."""
        record = read_record(self._asked(request)) or {}
        return float(record.get("at", 0.0))

    def remember(self, request: str, key: str) -> None:
        """Lead a request to a content from now on."""
        write_record(self._asked(request), {"key": key, "at": time.time()})

    def add(self, part: Path, image: CachedImage) -> CachedImage:
        """Take an unpacked folder in under its digest; the same content twice is kept once."""
        key = image.digest
        target = self.folder / key
        kept = CachedImage(**(asdict(image) | {"folder": str(target)}))
        with self.locked(key):
            present = self.get(key)
            if present is not None:
                return present
            if target.exists():  # its record was lost: what it holds is not known
                target.rename(self._root / "trash" / uuid.uuid4().hex)
            part.rename(target)
            write_record(self.folder / f"{key}.json", asdict(kept))
        return kept

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lock of this node, which ends with the process too."""
        with (self._index / "locks" / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def keys(self) -> list[str]:
        """Return the digests of all images, least recently used first."""
        found = []
        for path in self.folder.glob("*.json"):
            with suppress(OSError):
                if KEY_PATTERN.fullmatch(path.stem):
                    found.append((path.stat().st_mtime, path.stem))
        return [key for _, key in sorted(found)]

    def size(self) -> int:
        """Return the bytes that the images take."""
        return sum(self._bytes(key) for key in self.keys())

    def used(self) -> set[str]:
        """Return the folders that instances run on, or that layers lie upon."""
        found: set[str] = set()
        for folder, name in (("instances", "record.json"), ("layers", "layer.json")):
            for path in (self._root / folder).glob(f"*/{name}"):
                record = read_record(path) or {}
                found.add(str(record.get("image")))
        return found

    def evict(
        self,
        *,
        remove: Callable[[Path], None],
        keep_bytes: int,
        grace_seconds: float = GRACE_SECONDS,
    ) -> list[str]:
        """Delete images in no use, least recently used first, until `keep_bytes` are left.

        Those used within the grace stay. `remove` deletes a folder; returns the digests deleted.
        """
        total = self.size()
        evicted = []
        for key in self.keys():
            if total <= keep_bytes:
                break
            size = self._bytes(key)
            if self._evict(key, remove, grace_seconds):
                total -= size
                evicted.append(key)
        return evicted

    def _evict(self, key: str, remove: Callable[[Path], None], grace_seconds: float) -> bool:
        record, target = self.folder / f"{key}.json", self.folder / key
        trash = self._root / "trash" / uuid.uuid4().hex
        with self.locked(key):
            with suppress(FileNotFoundError):
                if time.time() - record.stat().st_mtime < grace_seconds:
                    return False
            if str(target) in self.used():
                return False
            with suppress(FileNotFoundError):
                target.rename(trash)
            record.unlink(missing_ok=True)
        if trash.exists():
            remove(trash)
        return True

    def sweep(self, remove: Callable[[Path], None], *folders: Path) -> int:
        """Delete the work folders of processes that died; those at work hold a lock."""
        swept = 0
        for folder in (self.folder, *folders):
            names = {path.name.removesuffix(HELD) for path in folder.glob(f"{WORK}*")}
            for path in (folder / name for name in names):
                with suppress(PermissionError):  # another account's
                    swept += _sweep(path, remove)
        return swept

    def _bytes(self, key: str) -> int:
        record = read_record(self.folder / f"{key}.json") or {}
        return int(record.get("image_bytes", 0))

    def _asked(self, request: str) -> Path:
        return self._index / "asked" / f"{request}.json"


def _sweep(folder: Path, remove: Callable[[Path], None]) -> bool:
    held = _held(folder)
    descriptor = try_lock(held)
    if descriptor is None:
        return False
    try:
        remove(folder)
        held.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True


@contextmanager
def work_folder(parent: Path, remove: Callable[[Path], None]) -> Iterator[Path]:
    """Make a folder that is deleted at the end, and swept when this process dies before it.

    A lock beside it, taken before it exists, tells the sweeps of all processes that it is in use.
    """
    folder = parent / f"{WORK}{uuid.uuid4().hex}"
    held = _held(folder)
    descriptor = try_lock(held)
    while descriptor is None:  # a sweep took the new file for an abandoned one
        descriptor = try_lock(held)
    try:
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            remove(folder)
    finally:
        held.unlink(missing_ok=True)
        os.close(descriptor)


def _held(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{HELD}")
