"""One Python process in a sandbox, as descriptors: its text, its orders, its frames."""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sandboxes.runtime.argv import ENTER_DESCRIPTOR
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.python_kernel import DONE, INTERRUPTS, REPLIES, REQUESTS
from sandboxes.runtime.spawner import Spawner
from sandboxes.runtime.streams import HeadTail

MAX_FRAME_BYTES = 8 * 1024 * 1024

_CHUNK = 65536
_HEAD_BYTES = 5
_EXIT_SECONDS = 1.0
_LAST_READS = 4  # a pipe holds 64 KiB
_TARGETS = (0, 1, 2, ENTER_DESCRIPTOR, REQUESTS, REPLIES, INTERRUPTS)

Frame = tuple[bytes, bytes]


class Interpreter:
    """Hold our ends of one interpreter's pipes; text goes to what `capture` names.

    `frames` are those that arrived and were not taken. `ended` says that the process ended, with
    `exit_code`, or (None) that it sent what no interpreter of ours sends.
    """

    def __init__(
        self,
        spawner: Spawner,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        limits: Mapping[str, int | None] | None = None,
        cwd: str = "/",
    ) -> None:
        self.frames: deque[Frame] = deque()
        self.exit_code: int | None = None
        self.ended = False
        self._open: list[int] = []
        theirs: list[int] = []
        try:
            null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            theirs.append(null)
            self._output = self._pipe(theirs, ours_reads=True)
            theirs.append(theirs[-1])  # both streams are one pipe: the order stays
            self._status = self._pipe(theirs, ours_reads=True)
            self._requests = self._pipe(theirs, ours_reads=False)
            self._replies = self._pipe(theirs, ours_reads=True)
            self._interrupts = self._pipe(theirs, ours_reads=False)
            self._channel = spawner.execute(
                argv, env=env, descriptors=theirs, targets=_TARGETS, limits=limits, cwd=cwd
            )
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)
        self._pending = memoryview(b"")
        self._received = bytearray()
        self._captured = HeadTail(0)
        self._cut = False  # no reply can come any more
        self._poller = select.poll()
        for descriptor in (self._output, self._replies, self._channel.fileno()):
            self._poller.register(descriptor, select.POLLIN)

    @property
    def entered(self) -> bool:
        """Tell whether the sandbox was entered."""
        with suppress(BlockingIOError):
            return bool(os.read(self._status, 1))
        return False

    def capture(self, output: HeadTail) -> None:
        """Let the text that comes from now on go there."""
        self._captured = output

    def send(self, kind: bytes, payload: bytes) -> None:
        """Queue one frame."""
        self.feed(kind + len(payload).to_bytes(4, "big") + payload)

    def feed(self, data: bytes) -> None:
        """Queue bytes for the requests pipe; what a former cell left there goes."""
        if not self._pending:
            self._poller.register(self._requests, select.POLLOUT)
        self._pending = memoryview(data)

    def interrupt(self) -> None:
        """Press Ctrl-C: the interpreter's process group gets SIGINT."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._interrupts, b"!")

    def step(self, seconds: float) -> None:
        """Wait for something to move and move it; nothing moves after the end."""
        if self.ended:
            return
        ready = dict(self._poller.poll(max(0.0, seconds) * 1000))
        if self._requests in ready:
            self._write()
        if self._output in ready and not self._read_text(_CHUNK):
            self._poller.unregister(self._output)
        if self._replies in ready:
            self._read_replies()
        if any(kind == DONE for kind, _ in self.frames):
            self.drain()
        if self._channel.fileno() in ready:
            self._take_exit()

    def drain(self) -> None:
        """Take the text that lies in the pipe now; who goes on writing is not awaited."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._output, termios.FIONREAD, waiting)
        while waiting[0] > 0:
            taken = self._read_text(min(waiting[0], _CHUNK))
            if not taken:
                return
            waiting[0] -= taken

    def close(self) -> None:
        """End the interpreter's whole session; idempotent."""
        self._channel.close()
        self._close_descriptors()

    def _pipe(self, theirs: list[int], *, ours_reads: bool) -> int:
        read, write = os.pipe2(os.O_CLOEXEC)
        ours, other = (read, write) if ours_reads else (write, read)
        theirs.append(other)
        self._open.append(ours)
        os.set_blocking(ours, False)
        return ours

    def _write(self) -> None:
        try:
            written = os.write(self._requests, self._pending[:_CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended, or closed the pipe: no cell can come any more
            written = len(self._pending)
        self._pending = self._pending[written:]
        if not self._pending:
            self._poller.unregister(self._requests)

    def _read_text(self, size: int) -> int:
        try:
            data = os.read(self._output, size)
        except BlockingIOError:
            return 1  # nothing now, which is not the end
        self._captured.feed(data)
        return len(data)

    def _read_replies(self) -> bool:
        """Take some replies; returns whether there may be more."""
        try:
            data = os.read(self._replies, _CHUNK)
        except BlockingIOError:
            return False
        if not data:  # every copy is closed
            with suppress(KeyError):
                self._poller.unregister(self._replies)
            self._await_exit()
            return False
        self._received += data
        while len(self._received) >= _HEAD_BYTES:
            size = int.from_bytes(self._received[1:_HEAD_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                self.ended = True
                return False
            if len(self._received) < _HEAD_BYTES + size:
                break
            payload = bytes(self._received[_HEAD_BYTES : _HEAD_BYTES + size])
            self.frames.append((bytes(self._received[:1]), payload))
            del self._received[: _HEAD_BYTES + size]
        return True

    def _await_exit(self) -> None:
        """Wait a little for an end that is on its way, else bring it about."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        if not poller.poll(_EXIT_SECONDS * 1000):
            self._channel.send({"op": "kill"})
            self._cut = True

    def _take_exit(self) -> None:
        with suppress(SandboxFault):
            status = int(self._channel.receive()[0]["status"])
            self.exit_code = None if self._cut else status
        for _ in range(_LAST_READS):
            if not self._read_replies():
                break
        self.ended = True

    def _close_descriptors(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
