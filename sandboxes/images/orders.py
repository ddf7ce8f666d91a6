"""What the process that gets images is told to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from sandboxes.images.specs import ImageSpec


@dataclass(frozen=True, kw_only=True)
class Order:
    """Describe the work of one process: get `spec`, or only evict where there is none.

    `scratch` is the engine's folder for temporary files, `env` its whole environment. `again`
    passes over what an earlier pull or scratch build left.
    """

    root: Path
    scratch: Path
    env: Mapping[str, str]
    engine: str
    unsquashfs: str
    unshare: str
    spec: ImageSpec | None
    again: bool = False
    insecure: tuple[str, ...] = ()
    keep_bytes: int
    engine_cache_bytes: int
    reserve_bytes: int
    grace_seconds: float
    image_root: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the order as JSON-able values."""
        return {
            **asdict(self),
            "root": str(self.root),
            "scratch": str(self.scratch),
            "env": dict(self.env),
            "spec": self.spec.as_dict() if self.spec else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build an order from `as_dict`'s values; raises KeyError or TypeError."""
        spec = ImageSpec.from_dict(data["spec"]) if data["spec"] else None
        paths = {"root": Path(data["root"]), "scratch": Path(data["scratch"])}
        return cls(**{**data, **paths, "spec": spec, "insecure": tuple(data["insecure"])})
