"""A bash on a pseudo-terminal, as descriptors: the terminal, its orders, its reports."""

from __future__ import annotations

import os
import select
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.spawner import Channel, Spawner

ORDERS_DESCRIPTOR = 8  # the shell reads command texts from it, each ended by NUL
REPORTS_DESCRIPTOR = 9  # the shell writes directory and exports to it, NUL-separated

_CHUNK = 65536
_REPORT_LIMIT = 1024 * 1024
_INTERRUPT = b"\x03"


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
    ) -> None:
        orders_read, self._orders = os.pipe2(os.O_CLOEXEC)
        self._reports, reports_write = os.pipe2(os.O_CLOEXEC)
        # A description of our own, so that not to block does not reach the shell's end.
        mine = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self._orders_read = os.open(f"/proc/self/fd/{orders_read}", mine)
        self._open = [self._orders_read, self._orders, self._reports]
        try:
            self._channel, self._master = spawner.open_terminal(
                argv,
                env=env,
                descriptors=(orders_read, reports_write),
                targets=(ORDERS_DESCRIPTOR, REPORTS_DESCRIPTOR),
                limits=limits,
                cwd=cwd,
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            os.close(orders_read)
            os.close(reports_write)
        self._open.append(self._master)
        for descriptor in (self._orders, self._reports, self._master):
            os.set_blocking(descriptor, False)
        self._pending = memoryview(b"")
        self._report = bytearray()
        self.shell_group = 0
        self.exit_code: int | None = None
        self.ended = False

    @property
    def channel(self) -> Channel:
        """Return the channel to the spawner."""
        return self._channel

    def reset_modes(self) -> None:
        """Set the modes a command may have changed: no echo, signals and line editing on."""
        with suppress(termios.error):
            modes = termios.tcgetattr(self._master)
            modes[0] = (modes[0] | termios.ICRNL) & ~(termios.IXON | termios.ISTRIP)
            modes[1] &= ~termios.OPOST  # bytes arrive as they were written
            modes[3] |= termios.ISIG | termios.ICANON
            modes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHONL | termios.NOFLSH)
            modes[6][termios.VINTR] = _INTERRUPT
            termios.tcsetattr(self._master, termios.TCSANOW, modes)

    def type(self, line: bytes) -> None:
        """Type one short line (under 4096 bytes) at the terminal."""
        self._write_master(line + b"\n")

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self._write_master(_INTERRUPT)

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

    def order(self, text: bytes) -> None:
        """Queue one text for the orders pipe; what an interrupt left there goes first."""
        self.forget_orders()
        self._pending = memoryview(text + b"\0")
        self._report.clear()

    def forget_orders(self) -> None:
        """Take back what the shell has not read."""
        self._pending = memoryview(b"")
        with suppress(BlockingIOError):
            while os.read(self._orders_read, _CHUNK):
                pass

    def read(self, seconds: float) -> bytes:
        """Feed orders, collect reports, and return what the terminal shows; b"" is nothing.

        Sets `ended` and `exit_code` when the shell ended.
        """
        poller = select.poll()
        poller.register(self._master, select.POLLIN)
        poller.register(self._channel.fileno(), select.POLLIN)
        if self._reports in self._open:
            poller.register(self._reports, select.POLLIN)
        if self._pending:
            poller.register(self._orders, select.POLLOUT)
        ready = dict(poller.poll(max(0.0, seconds) * 1000))
        if self._orders in ready:
            self._feed()
        if self._reports in ready:
            self._collect()
        if self._master in ready:
            try:
                data = os.read(self._master, _CHUNK)
            except BlockingIOError:
                data = b""
            except OSError:  # EIO: no process has the terminal open any more
                self._await_exit()
                return b""
            if data:
                return data
        if self._channel.fileno() in ready:
            self._take_exit()
        return b""

    def report(self) -> list[bytes]:
        """Return the NUL-separated fields reported since the last order."""
        if self._reports in self._open:
            self._collect()
        return bytes(self._report).split(b"\0")[:-1]

    def close(self) -> None:
        """End the shell's whole session; idempotent."""
        self._channel.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _write_master(self, data: bytes) -> None:
        # A terminal that takes nothing belongs to a stopped or dead shell: the caller's
        # deadline finds out, so this must not wait.
        poller = select.poll()
        poller.register(self._master, select.POLLOUT)
        if poller.poll(100):
            with suppress(OSError):
                os.write(self._master, data)

    def _feed(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            written = os.write(self._orders, self._pending[:_CHUNK])
            self._pending = self._pending[written:]

    def _collect(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._reports, _CHUNK):
                if len(self._report) < _REPORT_LIMIT:
                    self._report += data
            os.close(self._reports)
            self._open.remove(self._reports)

    def _take_exit(self) -> None:
        try:
            message, _ = self._channel.receive()
            self.exit_code = int(message["status"])
        except SandboxFault:
            self.exit_code = None
        self.ended = True

    def _await_exit(self) -> None:
        deadline = time.monotonic() + 1
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        if poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            self._take_exit()
        self.ended = True
