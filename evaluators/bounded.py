"""Do work on hostile input in a forked process with a limit of processor time.

A hostile text can make a parser run for hours, take all memory or end its process. What that
costs must be a fact about the text, not the end of the grading, and must not depend on how busy
the node is: hence a process of its own, and processor time instead of the clock's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

OUTPUT_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the process told before it ended: JSON values in order, and why it told no more.

    `trouble` is "" when it finished, `time` when its seconds were used up, else what ended it.
    """

    values: tuple[Any, ...]
    trouble: str = ""


def tell_within(seconds: float, work: Callable[[], Iterator[Any]]) -> Told:
    """Run a generator of JSON values in a fork and return what it told within the limit.

    `seconds` are processor time. The fork has the memory limit of its parent, prints nothing and
    leaves nothing behind. Not for processes with threads that hold locks.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(writer, seconds, work)
    os.close(writer)
    ended = False
    try:
        data = _read(reader)
        _, status = os.waitpid(pid, 0)
        ended = True
    finally:
        os.close(reader)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return _told(data, status)


def _work(writer: int, seconds: float, work: Callable[[], Iterator[Any]]) -> None:
    """Work and end the process, whatever happens: the fork must never return into the caller."""
    status = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        for value in work():
            os.write(writer, json.dumps({"told": value}).encode() + b"\n")
        status = 0
    except BaseException as error:
        # Foreign parsers raise whatever they like; nothing of it may reach the caller's frames.
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps({"broke": type(error).__name__}).encode() + b"\n")
    finally:
        os._exit(status)


def _read(reader: int) -> bytes:
    data = b""
    while len(data) < OUTPUT_BYTES:
        more = os.read(reader, 65536)
        if not more:
            break
        data += more
    return data


def _told(data: bytes, status: int) -> Told:
    values: list[Any] = []
    trouble = ""
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if "broke" in entry:
            trouble = str(entry["broke"])
            break
        values.append(entry["told"])
    if os.WIFSIGNALED(status):
        signaled = os.WTERMSIG(status)
        trouble = "time" if signaled == signal.SIGPROF else f"signal {signaled}"
    return Told(values=tuple(values), trouble=trouble)
