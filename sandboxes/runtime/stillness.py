"""Let the processes of an instance stand still for a while, and go on whatever happens to us."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from sandboxes.runtime.inside import namespace_members
from sandboxes.runtime.processes import ProcessStat, read_stat

_MOST_FILES = 65536


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop every process of an instance, except its first; they go on at the end.

    A guardian lets them go on: a fork in a session of its own, which was told of each before it
    was stopped, and acts when this process closes its pipe or dies. This process must have one
    thread.
    """
    guardian, orders = _fork_guardian()
    told: list[tuple[int, int]] = []

    def tell(stat: ProcessStat) -> None:
        os.write(orders, b"%d %d\n" % (stat.pid, stat.start_ticks))
        told.append((stat.pid, stat.start_ticks))

    try:
        _hold_still(pid, tell)
        yield
    finally:
        os.close(orders)
        if os.waitpid(guardian, 0)[1]:  # it was killed itself
            _move_again(told)


def _fork_guardian() -> tuple[int, int]:
    """Return the guardian's pid and where to write "pid ticks" lines to."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(reader)
        return pid, writer
    code = 1
    try:
        os.setsid()
        os.closerange(3, reader)
        os.closerange(reader + 1, _MOST_FILES)
        text = b""
        while data := os.read(reader, 65536):
            text += data
        pairs = (line.split() for line in text.splitlines())
        _move_again([(int(number), int(ticks)) for number, ticks in pairs])
        code = 0
    finally:
        os._exit(code)


def _hold_still(pid: int, tell: Callable[[ProcessStat], None]) -> None:
    """SIGSTOP every process of an instance, parents first; each is told of before.

    A shell that is stopped before its children, and goes on after them, does not see that
    they were stopped; the same holds for nsenter, which would stop itself for good with its
    child. The first process is let be: the engine's monitor takes its stop for its end. What
    was stopped already is left alone.
    """
    held: set[int] = set()
    while True:  # until a look finds nothing new: what is not yet stopped may fork
        members = {member for member in namespace_members(pid) if member != pid}
        stats = [stat for member in members if (stat := read_stat(member))]
        outside = {stat.parent for stat in stats} - members - {pid}
        entered = [stat for parent in outside if (stat := read_stat(parent))]
        stats.sort(key=lambda each: (each.start_ticks, each.pid))
        fresh = [s for s in (*entered, *stats) if s.state not in "TtZX" and s.pid not in held]
        if not fresh:
            return
        for stat in fresh:
            tell(stat)
            with suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGSTOP)
                held.add(stat.pid)


def _move_again(held: list[tuple[int, int]]) -> None:
    """SIGCONT processes, given by pid and start, in the opposite order: children first."""
    for pid, ticks in reversed(held):
        with suppress(OSError):  # one that cannot be looked at does not keep the others stopped
            now = read_stat(pid)
            if now is not None and now.start_ticks == ticks:
                os.kill(pid, signal.SIGCONT)
