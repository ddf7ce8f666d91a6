"""What a reader must know of the machine to judge the numbers; no names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sandbox.stage import Stage


def describe(stage: Stage) -> dict[str, Any]:
    """Return cores, memory, kernel, versions and the file system as JSON-able values."""
    engine = subprocess.run(
        [stage.tools.engine, "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(stage.folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "engine": engine.stdout.strip(),
        "file_system": kind.stdout.strip(),
        "as_root": os.geteuid() == 0,
    }


def load() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
