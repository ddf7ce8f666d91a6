"""What the editor remembers to undo."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class PastEdit:
    """Hold one edit: the content before (None: no file), and a digest of the one after."""

    path: str
    before: bytes | None
    after: bytes


class EditHistory:
    """Keep the newest edits, bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._edits: deque[PastEdit] = deque()
        self._size = 0

    def keep(self, path: str, before: bytes | None, after: bytes) -> None:
        """Take an edit, and let go of the oldest ones above the limit."""
        self._edits.append(PastEdit(path, before, digest(after)))
        self._size += _weight(self._edits[-1])
        while self._size > self._limit:
            self._size -= _weight(self._edits.popleft())

    def last(self, path: str) -> PastEdit | None:
        """Return the newest edit of a file."""
        return next((edit for edit in reversed(self._edits) if edit.path == path), None)

    def forget(self, edit: PastEdit) -> None:
        """Let go of an edit that is undone."""
        self._edits.remove(edit)
        self._size -= _weight(edit)


def digest(data: bytes) -> bytes:
    """Return what tells one content from another."""
    return hashlib.sha256(data).digest()


def _weight(edit: PastEdit) -> int:
    return len(edit.before or b"") + len(edit.path) + 256
