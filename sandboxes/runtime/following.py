"""Follow one command to its end, or to what makes it be ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sandboxes.runtime.capture import Capture
from sandboxes.runtime.dialects import Dialect
from sandboxes.runtime.sessions import Cancelled
from sandboxes.runtime.spawner import POLL_SECONDS
from sandboxes.runtime.terminal import Terminal

# How long each step of a recovery waits, and whether it kills the foreground first. An
# interrupt that falls between two programs of a loop meets nobody: it is tried again.
_LADDER = ((0.1, False), (0.4, False), (0.5, True), (0.5, True), (0.5, True))
_SETTLE_SECONDS = 0.02
_KILL_SECONDS = 0.2
_NUDGE_SECONDS = 1.0

Why = str  # "timeout", "idle", "cancelled" or "ended"; empty when the marker came


@dataclass(kw_only=True, slots=True)
class Bounds:
    """Bound one call; `nudge` are lines to ask a silent shell again with."""

    deadline: float
    idle_seconds: float | None = None
    cancelled: Cancelled | None = None
    nudge: bytes = b""


@dataclass(kw_only=True, slots=True)
class Job:
    """Hold the command at work: its token, and whether it has the terminal."""

    token: str
    interactive: bool
    changes: bool = True
    held: bytes = b""


def follow(terminal: Terminal, job: Job, capture: Capture, bounds: Bounds) -> Why:
    """Read until the marker; returns why there is none.

    Some errors make a sh forget the lines it has read, the marker with them. So a silent
    one in front is asked again; when it is only busy, the question waits and does no harm.
    """
    main = 1 if terminal.piped and not job.interactive else 0
    patience = _NUDGE_SECONDS
    asked = heard = time.monotonic()
    while True:
        now = time.monotonic()
        wait = bounds.deadline - now
        if bounds.cancelled is not None:
            if bounds.cancelled():
                return "cancelled"
            wait = min(wait, POLL_SECONDS)
        if now >= bounds.deadline:
            return "timeout"
        if bounds.idle_seconds is not None:
            if now - heard >= bounds.idle_seconds:
                return "idle"
            wait = min(wait, heard + bounds.idle_seconds - now)
        if bounds.nudge:
            if now - asked >= patience:
                asked, patience = now, 2 * patience
                if terminal.shell_in_front() and terminal.orders_taken():
                    terminal.order(bounds.nudge, again=True)
            wait = min(wait, asked + patience - now)
        output = terminal.read(wait)
        if output[1 - main]:
            capture.add(output[1 - main])
            heard = asked = time.monotonic()
        if output[main]:
            if capture.feed(output[main]):
                return ""
            heard = asked = time.monotonic()
        if terminal.ended:
            return "ended"


def recover(terminal: Terminal, dialect: Dialect, job: Job, capture: Capture) -> bool:
    """Interrupt, then kill the foreground, until the shell answers; False: it does not."""
    if not terminal.orders_taken():
        return False  # it stopped inside a line: the rest of it must never be run by itself
    for seconds, kills in _LADDER:
        terminal.reset_modes(restart_output=True)
        if kills:
            terminal.kill_foreground()
            # No Ctrl-C meanwhile: it would meet the shell itself, about to answer.
            if _answers(terminal, job, capture, _KILL_SECONDS):
                return True
        terminal.interrupt()
        if _answers(terminal, job, capture, _SETTLE_SECONDS):
            return True
        if not terminal.ended:
            terminal.order(dialect.answer(job.token, interactive=job.interactive), again=True)
        if _answers(terminal, job, capture, seconds):
            return True
        if terminal.ended:
            return False
    return False


def _answers(terminal: Terminal, job: Job, capture: Capture, seconds: float) -> bool:
    if terminal.ended:
        return False
    return not follow(terminal, job, capture, Bounds(deadline=time.monotonic() + seconds))
