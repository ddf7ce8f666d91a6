"""Locks between processes of a node, which end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Lock a file, made where it is missing, and return its descriptor, whose close unlocks.

    None when another has it, or has just deleted the file that was opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    os.close(descriptor)
    return None
