"""What /proc says about processes, and signals that cannot hit a reused pid."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """Hold the fields of /proc/PID/stat that tell one process from another."""

    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int


class _Descriptor:
    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        os.close(self.number)


def read_stat(pid: int) -> ProcessStat | None:
    """Return what /proc/PID/stat says, or None when there is no such process.

    Raises OSError for any other trouble, such as too many open files: that is the reader's, and
    says nothing about the process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) < 20:
        return None
    return ProcessStat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def is_running(pid: int, start_ticks: int) -> bool:
    """Tell whether the process that started at `start_ticks` runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def ends_soon(alive: Callable[[], bool], *, seconds: float = 1.0) -> bool:
    """Tell whether what just refused us is on its way out: its namespaces go before it does."""
    deadline = time.monotonic() + seconds
    while alive():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_pids() -> list[int]:
    """Return every pid that /proc shows."""
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def all_stats() -> Iterator[ProcessStat]:
    """Yield every process that /proc shows; where it hides other users' (hidepid), only ours."""
    for pid in all_pids():
        with suppress(PermissionError):
            stat = read_stat(pid)
            if stat is not None:
                yield stat


def kill_process(pid: int, start_ticks: int, *, wait_seconds: float) -> bool:
    """SIGKILL exactly that process and wait; returns whether it is gone."""
    return await_end(pid, start_ticks, wait_seconds=wait_seconds, send=signal.SIGKILL)


def await_end(
    pid: int, start_ticks: int, *, wait_seconds: float, send: signal.Signals | None = None
) -> bool:
    """Wait for the end of exactly that process, after a signal; returns whether it is gone."""
    try:
        descriptor = _Descriptor(os.pidfd_open(pid))
    except ProcessLookupError:
        return True
    with closing(descriptor) as pidfd:
        if not is_running(pid, start_ticks):
            return True
        if send is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd.number, send)
        poller = select.poll()
        poller.register(pidfd.number, select.POLLIN)
        poller.poll(wait_seconds * 1000)
    return not is_running(pid, start_ticks)


def kill_sessions(sessions: Collection[int], *, rounds: int = 5) -> None:
    """SIGKILL every process of some sessions, background jobs included."""
    for _ in range(rounds):
        members = [s.pid for s in all_stats() if s.session in sessions and s.state not in "ZX"]
        if not members:
            return
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def kill_marked(marker: str, *, rounds: int = 5) -> None:
    """SIGKILL every process of ours whose environment holds `marker`, a `KEY=value`."""
    wanted = marker.encode()
    for _ in range(rounds):
        found = []
        for stat in all_stats():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                environment = Path(f"/proc/{stat.pid}/environ").read_bytes().split(b"\0")
                if stat.pid != os.getpid() and stat.state not in "ZX" and wanted in environment:
                    found.append(stat)
        if not found:
            return
        for stat in found:
            kill_process(stat.pid, stat.start_ticks, wait_seconds=1)


def descendants(pid: int) -> list[ProcessStat]:
    """Return the living processes below `pid`, parents before children."""
    children: dict[int, list[ProcessStat]] = {}
    for stat in all_stats():
        children.setdefault(stat.parent, []).append(stat)
    found: list[ProcessStat] = []
    queue = [pid]
    while queue:
        for stat in children.get(queue.pop(), []):
            if stat.state not in "ZX":
                found.append(stat)
            queue.append(stat.pid)
    return found


def raise_oom_score(pid: int | None = None, *, score: int = 700) -> None:
    """Make a process a better victim than the worker when memory runs out."""
    with suppress(OSError):
        Path(f"/proc/{pid or 'self'}/oom_score_adj").write_text(str(score))
