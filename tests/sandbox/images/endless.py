"""A build that never ends, and how to see that nothing of it is left."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from sandboxes.runtime.processes import all_pids

DEADLINE_SECONDS = 60.0
# A daemon of its own session, and something to wait for: neither may outlive the build.
ENDLESS = "setsid sleep 86399.5 & sleep 86398.5"
MARKS = (b"86399.5", b"86398.5")


def eventually(condition: Callable[[], bool]) -> bool:
    """Ask until it is so or the deadline passed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def working(root: Path) -> set[int]:
    """Return the processes that a build below a root has: of the engine, and of its sections."""
    found = set()
    for pid in all_pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        ours = pid != os.getpid() and os.fsencode(root) in line + environment
        if ours or any(mark in line for mark in MARKS):
            found.add(pid)
    return found
