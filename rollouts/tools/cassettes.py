"""Record what tools answered from outside, and replay it without any network.

One JSON file a call, named by the digest of its tool and canonical arguments: equal calls have
one answer, whichever episode asks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("live", "record", "replay")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class NotRecorded(Exception):
    """Say that a replay has no answer to a call."""


@dataclass(frozen=True)
class Cassettes:
    """Keep recorded answers in a folder; safe for any number of writers.

    `live` asks and keeps nothing, `record` asks and keeps the answer, `replay` never asks.
    """

    mode: str = "live"
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"the mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
        if self.mode != "live" and self.folder is None:
            raise ValueError(f"mode {self.mode} needs a folder for what is recorded")

    def answer(
        self, tool: str, arguments: Mapping[str, Any], ask: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the JSON answer to a call: asked for, and recorded if so set, or replayed.

        Raises `NotRecorded` and what `ask` raises; what was raised is never recorded.
        """
        if self.folder is None or self.mode == "live":
            return ask()
        path = self.folder / _UNSAFE.sub("_", tool) / f"{digest(tool, arguments)}.json"
        if self.mode == "replay":
            return _read(path, tool)
        answer = ask()
        _write(path, {"tool": tool, "arguments": dict(arguments), "answer": answer})
        return answer


def digest(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return the sha256 of a call, whatever the order of its arguments."""
    text = json.dumps([tool, arguments], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path, tool: str) -> dict[str, Any]:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))["answer"]
    except FileNotFoundError:
        raise NotRecorded(f"no answer to this call of {tool} was recorded") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRecorded(f"the recorded answer {path.name} of {tool} is not readable") from error
    if not isinstance(answer, dict):
        raise NotRecorded(f"the recorded answer {path.name} of {tool} is not readable")
    return answer


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a file in one step, so that a reader sees the old record or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file, sort_keys=True, indent=1)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
