"""What the fake runtimes of one node's processes know of each other: a folder of small files."""

from __future__ import annotations

import json
from pathlib import Path

from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec

_ENDING = ".sandbox"


class FakeNode:
    """Keep which sandboxes there are, for every process that uses the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder. Idempotent."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> set[str]:
        """Return the names of all sandboxes."""
        return {path.stem for path in self._folder.glob(f"*{_ENDING}")}

    def has(self, name: str) -> bool:
        """Tell whether a sandbox is there."""
        return self._path(name).exists()

    def add(self, spec: SandboxSpec, handle: SandboxHandle) -> None:
        """Make a sandbox known."""
        told = {"handle": handle.as_dict(), "image": spec.image, "workdir": spec.workdir}
        self._path(spec.name).write_text(json.dumps(told))

    def find(self, name: str) -> tuple[SandboxSpec, SandboxHandle] | None:
        """Return how a sandbox was started, as far as a driver needs to know."""
        try:
            told = json.loads(self._path(name).read_text())
        except FileNotFoundError:
            return None
        spec = SandboxSpec(name=name, image=told["image"], workdir=told["workdir"])
        return spec, SandboxHandle.from_dict(told["handle"])

    def remove(self, name: str) -> None:
        """Say that a sandbox is gone. Idempotent."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"
