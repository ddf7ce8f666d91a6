"""What an image is made from, and the keys under which a node finds it again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from sandboxes.images.exceptions import ImageBuildFailed, ReferenceInvalid
from sandboxes.images.references import REMOTE, Source, parse_source
from sandboxes.images.templates import shipped_template

Reuse = Literal["scratch", "versioned", "lock"]
Work = Literal["pull", "build", "unpack"]

MAX_DEFINITION_BYTES = 256 * 1024
MAX_FILES_BYTES = 1024 * 1024
MAX_FILES = 200
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """Describe an image; a path in `source` is absolute here.

    `definition` is the text of a definition file or template, `files` are laid beside it
    (relative path to text) for its %files section, `parameters` fill a template. `reuse` says
    when an explicit build takes what the node built before: never (`scratch`), when the rendered
    definition and the files are the same (`versioned`), or whenever `lock` is the same, whatever
    else changed (`lock`; an empty one never changes). Sandboxes take what is there.
    """

    name: str
    source: str
    definition: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    reuse: Reuse = "versioned"
    lock: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able values."""
        return asdict(self) | {"files": dict(self.files), "parameters": dict(self.parameters)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a description from `as_dict`'s values; raises TypeError."""
        return cls(**data)

    @property
    def parsed(self) -> Source:
        """Return what the source means; raises ReferenceInvalid."""
        return parse_source(self.source)

    @property
    def work(self) -> Work:
        """Return what getting the image is; raises ReferenceInvalid."""
        kind = self.parsed.kind
        if kind in REMOTE:
            return "pull"
        return "unpack" if kind == "path" else "build"

    def check(self) -> None:
        """Raise ReferenceInvalid or ImageBuildFailed when no node could get it."""
        source = self.parsed
        if source.kind == "template" and source.value:
            shipped_template(source.value)
        elif source.kind in ("definition", "template") and not self.definition.strip():
            raise ImageBuildFailed(f"{source.text} needs the text of a definition")
        if len(self.definition.encode()) > MAX_DEFINITION_BYTES:
            raise ImageBuildFailed(f"a definition has at most {MAX_DEFINITION_BYTES} bytes")
        if len(self.files) > MAX_FILES:
            raise ImageBuildFailed(f"at most {MAX_FILES} files go with a definition")
        total = 0
        for name, text in self.files.items():
            parts = PurePosixPath(name).parts
            if not isinstance(text, str) or not _FILE_NAME.fullmatch(name) or ".." in parts:
                raise ReferenceInvalid(f"not a file to lay beside a definition: {name!r}")
            total += len(text.encode())
        if total > MAX_FILES_BYTES:
            raise ImageBuildFailed(
                f"files beside a definition have {MAX_FILES_BYTES} bytes at most"
            )


def request_key(spec: ImageSpec) -> str:
    """Return the key of what was asked for, known before anything is rendered or read.

    A file's key changes with its size, time and inode; raises OSError when there is no file.
    """
    source = spec.parsed
    if source.kind == "path":
        stat = Path(source.value).stat()
        return _hash("path", source.value, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if source.kind in REMOTE:
        return _hash(source.text)
    if spec.reuse == "lock":
        return _hash("lock", spec.name, spec.lock)
    text = shipped_template(source.value) if source.value else spec.definition
    name = spec.name if spec.reuse == "scratch" else ""
    return _hash(spec.reuse, name, source.kind, text, dict(spec.parameters), dict(spec.files))


def version_key(definition: str, files: Mapping[str, str]) -> str:
    """Return the key of a rendered definition and the files beside it."""
    return _hash("version", definition, dict(files))


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
