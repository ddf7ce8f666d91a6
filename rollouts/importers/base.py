"""What an importer reads: one record per task, or the reason why there is none."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """Hold one file: its bytes and its permission bits (0o755 or 0o644 when imported)."""

    data: bytes
    mode: int = 0o644


Files = Mapping[str, FileContent]
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, kw_only=True)
class ImageBuild:
    """Hold what an image is built from: a definition, and texts laid beside it by path."""

    definition: str
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return a name in the catalogue that equal definitions and files share."""
        text = json.dumps([self.definition, dict(self.files)], sort_keys=True)
        return f"built-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """Hold one task as imported.

    `files` are put under `/setup` before `setup` runs; `tests` go to `/tests` for grading only
    and `solution` to `/solution` never during a rollout: both are hidden from the agent, as is
    `evaluator_payload`. Timeouts are seconds. `image` is a name in the catalogue or a reference
    such as `docker://…`; `build` is a definition to make one from, which wins. `environment` is
    what the task asks of its sandbox (agent, cpus, memory_mb, storage_mb, workdir, env,
    network_mode, allowed_hosts), as JSON. `messages` is the conversation that the agent goes on
    from, as `check_conversation` returns it. `source` is what else the row held: kept, and hidden
    as the tests are.
    """

    ref: str
    instruction: str
    setup: str | None = None
    files: Files = field(default_factory=dict)
    tests: Files = field(default_factory=dict)
    solution: Files = field(default_factory=dict)
    agent_timeout_seconds: float = 600.0
    verifier_timeout_seconds: float = 600.0
    image: str | None = None
    build: ImageBuild | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    evaluator: str
    evaluator_settings: Mapping[str, Any] = field(default_factory=dict)
    evaluator_payload: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        """Return a sha256 over all but `ref`: equal on every machine for equal content."""
        body: dict[str, Any] = {
            "instruction": self.instruction,
            "setup": self.setup,
            "files": encode_files(self.files),
            "tests": encode_files(self.tests),
            "solution": encode_files(self.solution),
            "timeouts": [self.agent_timeout_seconds, self.verifier_timeout_seconds],
            "image": self.image,
            "environment": self.environment,
            "evaluator": [self.evaluator, self.evaluator_settings, self.evaluator_payload],
            "metadata": self.metadata,
        }
        # Tasks without keep the hash that they were imported with.
        if self.messages:
            body["messages"] = list(self.messages)
        if self.source:
            body["source"] = self.source
        if self.build:
            body["build"] = self.build.name
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RejectedTask:
    """Say why a task was not imported and what to do about it; `raw` is what was read of it."""

    path: Path
    reason: str
    raw: str = ""


class TaskRejected(Exception):
    """Say that one task cannot be imported; the message says what to do."""

    code = "import.task_rejected"


class InvalidEncodedFiles(ValueError):
    """Say that a JSON map of files is not what `encode_files` writes."""

    code = "import.files_invalid"


def json_copy(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a copy that JSON in a database can hold.

    Raises `TaskRejected` for dates, NaN, NUL characters and half surrogate pairs.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise TaskRejected(f"{where}: {error}; use texts, finite numbers and lists") from error
    if ESCAPED_NUL.search(text):
        raise TaskRejected(f"{where} holds a NUL character; remove it")
    copy: dict[str, Any] = json.loads(text)
    return copy


def encode_files(files: Files) -> dict[str, dict[str, Any]]:
    """Return files as JSON: `{path: {"base64": str, "mode": int}}`, in path order."""
    return {
        path: {"base64": base64.b64encode(files[path].data).decode(), "mode": files[path].mode}
        for path in sorted(files)
    }


def decode_files(encoded: Mapping[str, Any]) -> dict[str, FileContent]:
    """Rebuild files from their JSON; raise `InvalidEncodedFiles` for anything else."""
    files: dict[str, FileContent] = {}
    for path, entry in encoded.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise InvalidEncodedFiles(f"file {path!r} is not a relative path inside its folder")
        try:
            data = base64.b64decode(entry["base64"], validate=True)
            mode = entry["mode"]
        except (TypeError, KeyError, ValueError, binascii.Error) as error:
            raise InvalidEncodedFiles(f"file {path!r} is not base64 with a mode") from error
        if type(mode) is not int or not 0 <= mode <= 0o7777:
            raise InvalidEncodedFiles(f"file {path!r} has mode {mode!r}, not 0 to 0o7777")
        files[path] = FileContent(data=data, mode=mode)
    return files
