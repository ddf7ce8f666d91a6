"""A shell on a pseudo-terminal, as descriptors: its orders, its output, its reports.

The terminal controls the shell's jobs in any case. With `piped` the output of commands comes
through a pipe instead, which is ten times faster; the terminal then carries only what programs
write to /dev/tty.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sandboxes.runtime.dialects import PIPE_DESCRIPTOR
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.modes import INTERRUPT, Modes
from sandboxes.runtime.reports import Reports
from sandboxes.runtime.spawner import Spawner

Output = tuple[bytes, bytes]
"""What came from the terminal, and what came from the pipe."""

NOTHING: Output = (b"", b"")
LINE_BYTES = 4095  # the longest line that a terminal takes while it edits lines

_ORDERS_DESCRIPTOR = 0
_REPORTS_DESCRIPTOR = 9
_CHUNK = 64 * 1024
_PIPE_BYTES = 1024 * 1024
_MANY = 2048  # a read of so much is followed by another without asking
_MOST = 1024 * 1024  # returned by one read
# A terminal holds 4 KiB, which the kernel refills within microseconds: yielding so often is
# cheaper than to sleep. A pipe holds 1 MiB: who writes much goes undisturbed for a moment.
_YIELDS = 8
_BULK_BYTES = 32 * 1024
_BULK_SECONDS = 0.0005
_PATIENCE_MS = 20.0
_SILENCE_SECONDS = 0.1  # who wrote much and is silent for so long has stopped


class Terminal:
    """Hold our ends of one shell; `shell_group` is its process group once it is idle."""

    def __init__(
        self,
        spawner: Spawner,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        limits: Mapping[str, int | None] | None = None,
        cwd: str = "/",
        piped: bool = False,
    ) -> None:
        orders_read, self._orders = os.pipe2(os.O_CLOEXEC)
        self._reports_end, reports_write = os.pipe2(os.O_CLOEXEC)
        passed = {_ORDERS_DESCRIPTOR: orders_read, _REPORTS_DESCRIPTOR: reports_write}
        self._open = [self._orders, self._reports_end]
        self._pipe = -1
        if piped:
            self._pipe, passed[PIPE_DESCRIPTOR] = os.pipe2(os.O_CLOEXEC)
            self._open.append(self._pipe)
            with suppress(OSError):  # the account's share of pipe memory is used up
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._channel, self._master = spawner.open_terminal(
                argv,
                env=env,
                descriptors=tuple(passed.values()),
                targets=tuple(passed),
                limits=limits,
                cwd=cwd,
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for descriptor in passed.values():
                os.close(descriptor)
        self._open.append(self._master)
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
        self.piped = piped
        self.reports = Reports()
        self.shell_group = 0
        self.exit_code: int | None = None
        self.ended = False
        self._pending = b""
        self._taken = True
        self._typed = memoryview(b"")
        self.modes = Modes(self._master)
        # What an answer comes through, polled for every command; the rest only after a while.
        self._quick = select.poll()
        for descriptor in (self._master, self._channel.fileno(), self._pipe):
            if descriptor >= 0:
                self._quick.register(descriptor, select.POLLIN)

    def reset_modes(self, *, restart_output: bool = False) -> None:
        """Set the modes a command may have changed; see `Modes.reset`."""
        self.modes.reset(restart_output=restart_output)

    def type(self, data: bytes) -> None:
        """Type at the terminal, after what it has not taken yet."""
        self._typed = memoryview(bytes(self._typed) + data)
        self._feed_typed()

    def forget_typed(self) -> None:
        """Take back what was typed and nobody read."""
        self._typed = memoryview(b"")
        self.modes.drop_input()

    def interrupt(self) -> None:
        """Type Ctrl-C ahead of everything."""
        self._typed = memoryview(b"")
        # A terminal that takes nothing belongs to a stopped or dead shell: the caller's deadline
        # finds out, so this does not wait.
        with suppress(OSError):
            os.write(self._master, INTERRUPT)

    def kill_foreground(self) -> None:
        """SIGKILL the foreground process group unless it is the shell's own."""
        self._channel.send({"op": "kill_foreground", "shell": self.shell_group})

    def note_shell_group(self) -> None:
        """Remember which process group is in the foreground of the idle shell."""
        with suppress(OSError):
            self.shell_group = os.tcgetpgrp(self._master)

    def shell_in_front(self) -> bool:
        """Tell whether no program holds the terminal: the shell works itself, or waits."""
        try:
            return os.tcgetpgrp(self._master) == self.shell_group
        except OSError:
            return False

    def order(self, lines: bytes, *, again: bool = False) -> None:
        """Give the shell lines to run, after those it has not read yet.

        `again` marks lines that only ask once more: they may wait unread.
        """
        self._taken = self._taken and again
        self._pending = self._pending + lines if self._pending else lines
        self._feed_orders()

    def orders_taken(self) -> bool:
        """Tell whether the shell has read all its lines, those that only ask again excepted."""
        if not self._pending and not self._taken:
            waiting = array.array("i", [0])
            fcntl.ioctl(self._orders, termios.FIONREAD, waiting)
            self._taken = waiting[0] == 0
        return self._taken

    def read(self, seconds: float) -> Output:
        """Feed orders and typed text, collect reports, and return output; NOTHING is nothing.

        Sets `ended` and `exit_code` when the shell ended.
        """
        milliseconds = max(0.0, seconds * 1000)
        ready: list[tuple[int, int]] = []
        if not (self._pending or self._typed):
            ready = self._quick.poll(min(milliseconds, _PATIENCE_MS))
        if not ready and (milliseconds > _PATIENCE_MS or self._pending or self._typed):
            ready = self._poll_all(milliseconds)
        if not ready:
            return NOTHING
        numbers = [number for number, _ in ready]
        output = self._read_output(numbers)
        if self._channel.fileno() in numbers and not self.ended:
            self._take_exit()
            rest = self._read_output([self._master, self._pipe])  # all that it had written
            output = (output[0] + rest[0], output[1] + rest[1])
        return output

    def leftover(self, *, most_bytes: int, most_seconds: float) -> tuple[Output, bool]:
        """Return what was written since the last command, and whether it does not end.

        Less than a terminal's buffer is taken at once; who filled it may be writing for ever.
        """
        if not self._quick.poll(0):
            return NOTHING, False
        deadline = time.monotonic() + most_seconds
        output = self.read(0)
        total = taken = len(output[0]) + len(output[1])
        while taken and total > _MANY and not self.ended:
            if total > most_bytes or time.monotonic() > deadline:
                return output, True
            more = self.read(_SILENCE_SECONDS)
            taken = len(more[0]) + len(more[1])
            total += taken
            output = ((output[0] + more[0])[-_MOST:], (output[1] + more[1])[-_MOST:])
        return output, False

    def collect_reports(self) -> None:
        """Take what the shell has reported so far."""
        if self._reports_end not in self._open:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._reports_end, _CHUNK):
                self.reports.feed(data)
            os.close(self._reports_end)
            self._open.remove(self._reports_end)

    def await_report(self, token: str, seconds: float) -> None:
        """Wait until that command's report is there, the shell ended or the time is over."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._reports_end, select.POLLIN)
        poller.register(self._channel.fileno(), select.POLLIN)
        self.collect_reports()
        while not self.reports.complete(token) and self._reports_end in self._open:
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            self.collect_reports()
            if self._reports_end not in [number for number, _ in ready]:
                return

    def close(self) -> None:
        """End the shell's whole session; idempotent."""
        self._channel.close()
        self._close_descriptors()

    def _poll_all(self, milliseconds: float) -> list[tuple[int, int]]:
        poller = select.poll()
        typing = select.POLLOUT if self._typed else 0
        poller.register(self._master, select.POLLIN | typing)
        poller.register(self._channel.fileno(), select.POLLIN)
        if self._pipe >= 0:
            poller.register(self._pipe, select.POLLIN)
        if self._reports_end in self._open:
            poller.register(self._reports_end, select.POLLIN)
        if self._pending:
            poller.register(self._orders, select.POLLOUT)
        ready = poller.poll(milliseconds)
        for number, events in ready:
            if number == self._orders:
                self._feed_orders()
            elif number == self._reports_end:
                self.collect_reports()
            elif number == self._master and events & select.POLLOUT:
                self._feed_typed()
        return ready

    def _read_output(self, numbers: Sequence[int]) -> Output:
        shown = self._drain(self._master) if self._master in numbers else b""
        written = self._drain(self._pipe) if self._pipe >= 0 and self._pipe in numbers else b""
        return shown, written

    def _drain(self, descriptor: int) -> bytes:
        parts: list[bytes] = []
        total = yields = 0
        while total < _MOST:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                yields += 1
                if yields > _YIELDS or total < _MANY or descriptor == self._pipe:
                    break
                os.sched_yield()
                continue
            except OSError:  # EIO: no process has the terminal open any more
                data = b""
            if not data:
                self._await_exit()
                break
            parts.append(data)
            total += len(data)
            yields = 0
            if len(data) < _MANY:
                break
        if total >= _BULK_BYTES and descriptor == self._pipe:
            time.sleep(_BULK_SECONDS)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _close_descriptors(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _feed_orders(self) -> None:
        try:
            written = os.write(self._orders, self._pending)
        except (BlockingIOError, BrokenPipeError):
            return
        self._pending = self._pending[written:]

    def _feed_typed(self) -> None:
        with suppress(OSError):
            written = os.write(self._master, self._typed)
            self._typed = self._typed[written:]

    def _take_exit(self) -> None:
        try:
            message, _ = self._channel.receive()
            self.exit_code = int(message["status"])
        except SandboxFault:
            self.exit_code = None
        self.ended = True

    def _await_exit(self) -> None:
        if self.ended:
            return
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        if poller.poll(1000):
            self._take_exit()
        self.ended = True
