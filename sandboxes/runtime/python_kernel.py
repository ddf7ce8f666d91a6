"""The interpreter inside a sandbox: cells come in, text and images go out.

This text travels over a pipe and is executed by the image's own python3 (3.6 or newer, with the
standard library only); it never lies in there as a file. A frame is one letter, the payload's
length in four bytes, and the payload. Cells' text goes to descriptors 1 and 2, which are one
pipe; frames have descriptors of their own, which cells do not meet. What this file needs later
it holds by names of its own: a cell may put anything in place of `os.write`.
"""

# The syntax and the annotations are those of Python 3.6; names of arguments are the base classes'.
# ruff: noqa: ARG002, SIM105, UP031, UP037

import fcntl
import io
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandboxes.runtime.python_cells import (
        Figures,
        IPythonCells,
        PlainPython,
        explain,
        make_ipython,
    )

REQUESTS, REPLIES, INTERRUPTS = 4, 5, 6
CELL, READY, IMAGE, ERROR, DONE = b"C", b"R", b"I", b"E", b"D"
TOKEN_BYTES = 8
MOST_IMAGES = 16
MOST_IMAGE_BYTES = 4 * 1024 * 1024
MOST_ERROR_CHARACTERS = 32 * 1024

_SET_SIGNAL = getattr(fcntl, "F_SETSIG", 10)
_read, _write, _dup2, _getpid, _exit = os.read, os.write, os.dup2, os.getpid, os._exit
_signal, _default_interrupt = signal.signal, signal.default_int_handler
_exc_info = sys.exc_info


class NoInput(io.TextIOBase):
    """Stand where the standard input would be, and say that there is none."""

    def readable(self) -> bool:
        """Tell that reading may be tried."""
        return True

    def fileno(self) -> int:
        """Return the number of the real, empty input."""
        return 0

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        """Raise EOFError."""
        raise EOFError("input() does not work here: nobody can type; put the value in the code")

    read = readline  # type: ignore[assignment]

    def close(self) -> None:
        """Stay open: `exit()` closes it."""


def _protect(descriptor: int) -> int:
    """Return a copy with a high number, out of the way of cells, that no program inherits."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    high = 1024 if soft == resource.RLIM_INFINITY else min(soft, 1024)
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(high - 16, 16))
    os.close(descriptor)
    return copy


class Channel:
    """Hold the private descriptors, and put the standard ones back after each cell."""

    def __init__(self) -> None:
        self._pid = _getpid()
        self._output, self._null = _protect(os.dup(1)), _protect(os.dup(0))
        self._requests, self._replies = _protect(REQUESTS), _protect(REPLIES)
        self._interrupts = _protect(INTERRUPTS)
        self._images = 0
        self._streams = [self._open(1), self._open(2)]
        self._input = NoInput()
        self._listen()
        self.put_back()

    def receive(self) -> "tuple[bytes, bytes]":
        """Return the next request, its letter and payload; end when nobody asks any more."""
        head = self._take(5)
        return head[:1], self._take(int.from_bytes(head[1:], "big"))

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one reply; a fork that a cell made ends here instead."""
        if _getpid() != self._pid:
            _exit(0)
        left = kind + len(payload).to_bytes(4, "big") + payload
        while left:
            left = left[_write(self._replies, left) :]

    def send_image(self, kind: str, data: bytes) -> None:
        """Send an image, or say in the text why it is left out."""
        if len(data) > MOST_IMAGE_BYTES:
            sys.stdout.write("[image left out: %d bytes are too many]\n" % len(data))
        elif self._images == MOST_IMAGES:
            sys.stdout.write("[image left out: there were %d already]\n" % self._images)
        else:
            self._images += 1
            self.send(IMAGE, kind.encode() + b"\0" + data)

    def put_back(self) -> None:
        """Undo what a cell did to descriptors 0 to 2, to the streams and to the interrupt."""
        _signal(signal.SIGINT, _ignore)
        self._images = 0
        _dup2(self._null, 0)
        for number in (1, 2):
            _dup2(self._output, number)
            if self._streams[number - 1].closed:
                self._streams[number - 1] = self._open(number)
        sys.stdin = self._input
        sys.stdout, sys.stderr = self._streams
        try:
            while _read(self._interrupts, 4096):
                pass
        except BlockingIOError:
            pass

    def _open(self, number: int) -> io.TextIOWrapper:
        # Nothing is buffered: the text of print() and of programs stays in order.
        raw = io.FileIO(number, "w", closefd=False)
        return io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = _read(self._requests, size - len(data))
            if not part:
                _exit(0)
            data += part
        return data

    def _listen(self) -> None:
        """Let a byte on the third pipe be a Ctrl-C, for us and for programs that cells run.

        The kernel sends the signal: no thread that a cell could hold up, or would see.
        """
        try:
            os.setpgid(0, 0)
        except OSError:
            pass  # we lead a session, and with it a group
        os.set_blocking(self._interrupts, False)
        flags = fcntl.fcntl(self._interrupts, fcntl.F_GETFL)
        fcntl.fcntl(self._interrupts, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(self._interrupts, _SET_SIGNAL, signal.SIGINT)
        fcntl.fcntl(self._interrupts, fcntl.F_SETFL, flags | os.O_ASYNC)


def _ignore(number: int, frame: "Any") -> None:
    """Do nothing: the interrupt came too late for its cell."""


def serve(channel: Channel, cells: "Any", figures: "Figures") -> None:
    """Run cells until nobody asks any more."""
    channel.send(READY, cells.kind)
    while True:
        _, request = channel.receive()
        token = request[:TOKEN_BYTES]
        code = request[TOKEN_BYTES:].decode("utf-8", "surrogatepass")
        error = ""
        try:
            _signal(signal.SIGINT, _default_interrupt)
            error = cells.run(code)
            figures.show()
        except BaseException:
            error += explain(*_exc_info())
        channel.put_back()
        if error:
            if len(error) > MOST_ERROR_CHARACTERS:
                half = MOST_ERROR_CHARACTERS // 2
                error = error[:half] + "\n[...]\n" + error[-half:]
            channel.send(ERROR, error.encode("utf-8", "backslashreplace"))
        channel.send(DONE, token)


def main() -> None:
    """Set up, tell what kind of interpreter this is, and serve."""
    channel = Channel()
    cells: "Any" = None
    try:
        cells = IPythonCells(make_ipython(channel))
    except Exception:
        cells = PlainPython(channel)
    channel.put_back()
    figures = Figures(channel)
    sys.meta_path.insert(0, figures)
    sys.path.insert(0, "")  # as in any interactive Python; not sooner, or files there shadow ours
    serve(channel, cells, figures)
