"""What a forked child does to itself before it becomes a program of a sandbox."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime import cgroups

# A sandbox is a better victim than a keeper or the spawner, and these than the worker.
SANDBOX_SCORE = 700
SERVICE_SCORE = 500
_LIBC = ctypes.CDLL(None)  # looked up once: a child inherits it
_PR_SET_DUMPABLE = 4
_KINDS = (("processes", resource.RLIMIT_NPROC), ("file_bytes", resource.RLIMIT_FSIZE))


def confine(limits: Mapping[str, Any]) -> None:
    """Enter the instance's groups and take its limits; raises OSError when a group is gone.

    `limits` holds "cgroups" (files to enter), "processes" and "file_bytes"; each may be
    missing. RLIMIT_NPROC counts per user namespace (Linux 5.14), which is per sandbox.
    """
    cgroups.enter(limits.get("cgroups") or ())
    # After the drop from root /proc/self belongs to root until the next exec, or until this.
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    raise_own_score(SANDBOX_SCORE)
    for key, kind in _KINDS:
        value = limits.get(key)
        if value is not None:
            _, hard = resource.getrlimit(kind)
            wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (wanted, wanted))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_own_score(score: int) -> None:
    """Let the kernel end this process sooner when the node's memory runs out.

    Done with CAP_SYS_RESOURCE, no descendant can go below it again.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def raise_score(folder: Path) -> bool:
    """Put a process of a sandbox back to its score; tells whether it had been lowered.

    `folder` is the one of the process in a /proc.
    """
    with suppress(OSError, ValueError):
        descriptor = os.open(folder / "oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        try:
            if int(os.read(descriptor, 16)) < SANDBOX_SCORE:
                os.pwrite(descriptor, str(SANDBOX_SCORE).encode(), 0)
                return True
        finally:
            os.close(descriptor)
    return False
