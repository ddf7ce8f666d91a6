"""What every export has in common: it appears complete, or not at all."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from uuid import uuid4

from prorl_client.trajectories import Trajectory

_E = TypeVar("_E", bound="Export")

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


class Export(ABC):
    """A file, or a folder, that trajectories are written to.

    Written beside its place and moved there at the end of the `with` block; after an exception
    nothing is left, and what was there before stays.
    """

    needs_messages = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")

    def write(self, trajectory: Trajectory) -> None:
        """Add a trajectory."""
        self.add(trajectory)
        self.count += 1

    @abstractmethod
    def open(self) -> None:
        """Begin to write at `partial`."""

    @abstractmethod
    def add(self, trajectory: Trajectory) -> None:
        """Write one trajectory."""

    @abstractmethod
    def finish(self) -> None:
        """Write what is left and close; called after faults too."""

    def __enter__(self: _E) -> _E:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self.finish()
            if fault is None:
                self._move()
        finally:
            remove(self.partial)

    def _move(self) -> None:
        if self.partial.is_dir():
            remove(self.path)
        os.replace(self.partial, self.path)  # noqa: PTH105 - Path.replace says the same


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_export(path: str | Path, *, format: str | None = None) -> Export:
    """Return the export for a format, or for the path's ending. Raises ValueError.

    A path without an ending is a folder of ATIF documents.
    """
    from prorl_client.exports.atif import AtifExport, AtifLinesExport
    from prorl_client.exports.jsonl import JsonlExport
    from prorl_client.exports.parquet import ParquetExport

    place = Path(path)
    name = format or SUFFIXES.get(place.suffix) or ("atif" if not place.suffix else "")
    if name == "atif":
        return AtifLinesExport(place) if place.suffix else AtifExport(place)
    kinds: dict[str, type[Export]] = {"jsonl": JsonlExport, "parquet": ParquetExport}
    if name not in kinds:
        raise ValueError(f"{name or place.suffix!r} is no format; there are jsonl, parquet, atif.")
    return kinds[name](place)
