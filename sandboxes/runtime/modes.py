"""The modes of a shell's terminal, set from our end."""

from __future__ import annotations

import fcntl
import os
import termios
from collections.abc import Callable
from contextlib import suppress

INTERRUPT = b"\x03"

_TIOCGPTPEER = 0x5441  # asm-generic/ioctls.h: the terminal's other end, by no path
_NO_MODES = bytes(36)  # struct termios of asm-generic/termbits.h


class Modes:
    """Hold the modes a shell starts with: bytes pass as they are, no echo, Ctrl-C interrupts."""

    def __init__(self, master: int) -> None:
        self._master = master
        modes = termios.tcgetattr(self._master)
        modes[0] = (modes[0] | termios.ICRNL) & ~(termios.IXON | termios.ISTRIP)
        modes[1] &= ~termios.OPOST  # bytes arrive as they were written
        modes[3] |= termios.ISIG | termios.ICANON
        modes[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHONL | termios.NOFLSH)
        modes[6][termios.VINTR] = INTERRUPT
        termios.tcsetattr(self._master, termios.TCSANOW, modes)
        self._modes = fcntl.ioctl(self._master, termios.TCGETS, _NO_MODES)

    def reset(self, *, restart_output: bool = False) -> None:
        """Set the modes a command may have changed: no echo, signals and line editing on.

        With `restart_output` also what a program held up (XOFF, `tcflow`) flows again.
        """
        try:
            if fcntl.ioctl(self._master, termios.TCGETS, _NO_MODES) != self._modes:
                fcntl.ioctl(self._master, termios.TCSETS, self._modes)
        except OSError:
            pass  # the terminal is gone, which reading it will tell
        if restart_output:
            self._at_the_other_end(lambda slave: termios.tcflow(slave, termios.TCOON))

    def edits_lines(self) -> bool:
        """Tell whether the terminal hands over whole lines only, of `LINE_BYTES` at most."""
        try:
            return bool(termios.tcgetattr(self._master)[3] & termios.ICANON)
        except termios.error:
            return True

    def drop_input(self) -> None:
        """Forget what was typed and not read."""
        self._at_the_other_end(lambda slave: termios.tcflush(slave, termios.TCIFLUSH))

    def _at_the_other_end(self, act: Callable[[int], None]) -> None:
        with suppress(OSError, termios.error):
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
            slave = fcntl.ioctl(self._master, _TIOCGPTPEER, flags)
            try:
                act(slave)
            finally:
                os.close(slave)
