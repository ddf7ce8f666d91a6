"""Where a runtime keeps its things on a node, all below one root folder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.runtime.account import Account

NAME_PATTERN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,119}")
REFERENCE_PATTERN = re.compile(r"(?:layer|prepared)-[0-9a-f]{32}")
PREPARED = "prepared-"
WARM = "warm-"
MAX_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Compute paths; `root` is absolute and belongs to the sandbox account."""

    root: Path

    FOLDERS = ("instances", "layers", "locks", "images", "trash", "apptainer", "home", "tmp")

    def instance(self, name: str) -> Path:
        """Return the folder of one instance; raises ValueError for a name we never give."""
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"not a sandbox name: {name!r}")
        return self.root / "instances" / name

    def layer(self, reference: str) -> Path:
        """Return the folder of a frozen layer; raises ValueError for another text."""
        if not REFERENCE_PATTERN.fullmatch(reference):
            raise ValueError(f"not a layer reference: {reference!r}")
        return self.root / "layers" / reference

    def make(self) -> None:
        """Make the folders that are missing; run as the account."""
        for folder in self.FOLDERS:
            (self.root / folder).mkdir(mode=0o755, exist_ok=True)

    def names(self, prefix: str) -> list[str]:
        """Return the names of handed out instances that begin with `prefix`, sorted."""
        warm = prefix + WARM
        return [name for name in self._names(prefix) if not name.startswith(warm)]

    def warm_names(self, prefix: str) -> list[str]:
        """Return the names of instances started ahead and not handed out, sorted."""
        return self._names(prefix + WARM)

    def _names(self, prefix: str) -> list[str]:
        found = self._entries("instances")
        return sorted(n for n in found if n.startswith(prefix) and NAME_PATTERN.fullmatch(n))

    def references(self) -> list[str]:
        """Return the references of frozen layers, the prepared ones excepted, sorted."""
        return [name for name in self._references() if not name.startswith(PREPARED)]

    def prepared(self) -> list[str]:
        """Return the references of the prepared layers, sorted."""
        return [name for name in self._references() if name.startswith(PREPARED)]

    def _references(self) -> list[str]:
        return sorted(name for name in self._entries("layers") if REFERENCE_PATTERN.fullmatch(name))

    def _entries(self, folder: str) -> list[str]:
        try:
            return [path.name for path in (self.root / folder).iterdir()]
        except FileNotFoundError:
            return []

    def engine_records(self, name: str) -> list[Path]:
        """Return what the engine itself keeps about an instance: its entry and logs.

        Apptainer keeps entries below `app`, SingularityCE below `sing`.
        """
        base = self.root / "apptainer" / "instances"
        kinds = (f"app/*/*/{name}", f"sing/*/*/{name}", f"logs/*/*/{name}.*")
        return [path for kind in kinds for path in base.glob(kind)]


def make_root(root: Path, account: Account) -> None:
    """Make the root folder when it is missing; give a new or empty one to the account."""
    root.mkdir(parents=True, mode=0o755, exist_ok=True)
    if os.geteuid() == 0 and root.stat().st_uid == 0 and not any(root.iterdir()):
        os.chown(root, account.uid, account.gid)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON record so that a reader sees all of it or none."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(record))
    part.replace(path)


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a JSON record; None when it is missing, huge, or no object.

    Raises OSError when it is there and cannot be read now: that is not its end.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_RECORD_BYTES + 1)
        value = json.loads(data) if len(data) <= MAX_RECORD_BYTES else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None
