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
REFERENCE_PATTERN = re.compile(r"layer-[0-9a-f]{32}")
MAX_RECORD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Compute paths; `root` is absolute and belongs to the sandbox account."""

    root: Path

    FOLDERS = ("instances", "layers", "images", "trash", "apptainer", "home", "tmp")

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
        """Return the names of instance folders that begin with `prefix`, sorted."""
        try:
            found = [path.name for path in (self.root / "instances").iterdir()]
        except FileNotFoundError:
            return []
        return sorted(n for n in found if n.startswith(prefix) and NAME_PATTERN.fullmatch(n))

    def references(self) -> list[str]:
        """Return the references of all frozen layers, sorted."""
        try:
            found = [path.name for path in (self.root / "layers").iterdir()]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if REFERENCE_PATTERN.fullmatch(name))

    def engine_records(self, name: str) -> list[Path]:
        """Return what Apptainer itself keeps about an instance: its entry and logs."""
        base = self.root / "apptainer" / "instances"
        return [*base.glob(f"app/*/*/{name}"), *base.glob(f"logs/*/*/{name}.*")]


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
    """Read a JSON record; None when it is missing, huge, or no object."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_RECORD_BYTES + 1)
        value = json.loads(data) if len(data) <= MAX_RECORD_BYTES else None
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
