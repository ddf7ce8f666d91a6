"""A persistent Python interpreter in a sandbox: one cell at a time, over pipes of its own.

`python_kernel` and `python_cells` are the other side. What comes from there is hostile: frames
are bounded, and anything that is not one ends the interpreter.
"""

from __future__ import annotations

import functools
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from sandboxes.runtime import python_cells, python_kernel
from sandboxes.runtime.exceptions import EnterFailed, PythonFailed, SandboxGone
from sandboxes.runtime.interpreter import Frame, Interpreter
from sandboxes.runtime.processes import ends_soon
from sandboxes.runtime.screen import printable
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, PythonResult
from sandboxes.runtime.spawner import POLL_SECONDS
from sandboxes.runtime.streams import HeadTail

OPEN_SECONDS = 30.0
MAX_CODE_BYTES = 4 * 1024 * 1024
MAX_IMAGES_BYTES = 16 * 1024 * 1024  # of one cell, together

# How long each interrupt is waited for; the second meets code that caught the first. IPython's
# first traceback alone takes up to a second on a busy node.
_INTERRUPTS = (2.0, 1.0)
_EMPTY = 127  # the shell's word for a program that is not there
_SIGNATURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
# The first bytes on the pipe are the length of the program that follows them.
_BOOT = f"""import os, sys
if sys.version_info < (3, 6): sys.exit("Python 3.6 or newer is needed, this is " + sys.version)
sys.path[:] = [path for path in sys.path if path]
size = int(os.read({python_kernel.REQUESTS}, 12))
text = b""
while len(text) < size: text += os.read({python_kernel.REQUESTS}, size - len(text))
names = type(sys)("rollout_kernel").__dict__
for part in text.split(b"\\0"): exec(compile(part, {python_cells.SOURCE_NAME!r}, "exec"), names)
names["main"]()
"""


def kernel_argv() -> list[str]:
    """Return the program to start: it reads what it is from a descriptor."""
    return ["python3", "-c", _BOOT]


@functools.cache
def _kernel_source() -> bytes:
    parts = [Path(str(m.__file__)).read_bytes() for m in (python_cells, python_kernel)]
    text = b"\0".join(parts)
    return b"%12d" % len(text) + text


class _Cell:
    """Collect what one cell sends."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._room = MAX_IMAGES_BYTES
        self.images: list[tuple[str, bytes]] = []
        self.error = ""
        self.done = False

    def take(self, frame: Frame) -> None:
        """Take one frame; those of no known form are left out."""
        kind, payload = frame
        if kind == python_kernel.DONE:
            self.done = self.done or payload == self._token
        elif kind == python_kernel.ERROR:
            self.error = printable(payload)
        elif kind == python_kernel.IMAGE:
            name, _, data = payload.partition(b"\0")
            mime = name.decode("ascii", "replace")
            known = mime in _SIGNATURES and data.startswith(_SIGNATURES[mime])
            if known and len(data) <= self._room:
                self._room -= len(data)
                self.images.append((mime, data))


class KernelSession:
    """Keep one interpreter alive over many cells; replaces it when it ends.

    What threads and programs print after their cell ended stands before the next cell's output.
    """

    def __init__(self, start: Callable[[], Interpreter], alive: Callable[[], bool]) -> None:
        self._begin = start
        self._alive = alive
        self._interpreter: Interpreter | None = None
        self._kind = ""
        self._start()

    @property
    def kind(self) -> str:
        """Return "ipython", or "python" where the image has no IPython."""
        return self._kind

    def run(
        self,
        code: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> PythonResult:
        """Run a cell; see `PythonSession.run`."""
        began = time.monotonic()
        encoded = code.encode("utf-8", "surrogatepass")
        if len(encoded) > MAX_CODE_BYTES:
            refusal = f"The code is longer than {MAX_CODE_BYTES} bytes and was not run.\n"
            return PythonResult(output="", error=refusal, duration_seconds=0.0)
        interpreter, found_dead = self._find()
        output = HeadTail(output_bytes)
        interpreter.capture(output)
        token = secrets.token_bytes(python_kernel.TOKEN_BYTES)
        cell = _Cell(token)
        interpreter.send(python_kernel.CELL, token + encoded)
        why = self._follow(interpreter, cell, began + timeout_seconds, cancelled)
        if why in ("timeout", "cancelled"):
            for seconds in _INTERRUPTS:
                interpreter.interrupt()
                if self._follow(interpreter, cell, time.monotonic() + seconds, None) is None:
                    break
        interpreter.drain()
        error = cell.error
        if not cell.done:
            error += "" if why in ("timeout", "cancelled") else _how(interpreter)
            self._start()
        return PythonResult(
            output=printable(output.joined()),
            error=error,
            images=tuple(cell.images),
            duration_seconds=time.monotonic() - began,
            truncated=output.truncated,
            timed_out=why == "timeout",
            cancelled=why == "cancelled",
            restarted=found_dead or not cell.done,
        )

    def close(self) -> None:
        """End the interpreter and its session; idempotent."""
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None

    def _find(self) -> tuple[Interpreter, bool]:
        """Return an interpreter that runs, and whether it had to be started anew."""
        interpreter = self._interpreter
        if interpreter is not None:
            interpreter.step(0)
            if not interpreter.ended:
                return interpreter, False
        return self._start(), True

    def _start(self) -> Interpreter:
        """Start an empty interpreter in place of the present one."""
        self.close()
        if not self._alive():
            raise SandboxGone("the sandbox of this interpreter no longer runs")
        interpreter = self._begin()
        try:
            self._kind = self._greet(interpreter)
        except BaseException:
            interpreter.close()
            raise
        self._interpreter = interpreter
        return interpreter

    def _greet(self, interpreter: Interpreter) -> str:
        """Send the program and wait until it says what it is; returns that."""
        output = HeadTail(4096)
        interpreter.capture(output)
        interpreter.feed(_kernel_source())
        deadline = time.monotonic() + OPEN_SECONDS
        while not interpreter.frames and not interpreter.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PythonFailed(f"python3 did not become ready in {OPEN_SECONDS:g} s")
            interpreter.step(left)
        if interpreter.frames:
            return interpreter.frames.popleft()[1].decode("ascii", "replace")
        interpreter.drain()
        said = printable(output.joined()).strip()[-1000:]
        if ends_soon(self._alive):
            raise SandboxGone("the sandbox ended while an interpreter started in it")
        if not interpreter.entered:
            raise EnterFailed(f"no interpreter: {said}")
        if interpreter.exit_code == _EMPTY:
            raise PythonFailed(f"the image has no python3, which has to be added to it: {said}")
        raise PythonFailed(f"python3 ended at its start: {said or _how(interpreter)}")

    def _follow(
        self, interpreter: Interpreter, cell: _Cell, deadline: float, cancelled: Cancelled | None
    ) -> str | None:
        """Read until the cell is done; returns why it is not: timeout, cancelled or ended."""
        while True:
            while interpreter.frames:
                cell.take(interpreter.frames.popleft())
            if cell.done:
                return None
            if interpreter.ended:
                return "ended"
            if cancelled is not None and cancelled():
                return "cancelled"
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            interpreter.step(left if cancelled is None else min(left, POLL_SECONDS))


def _how(interpreter: Interpreter) -> str:
    code = interpreter.exit_code
    if code is None:
        return "The interpreter broke off.\n"
    if code > 128 and code - 128 in {int(each) for each in signal.Signals}:
        return f"The interpreter was ended by {signal.Signals(code - 128).name}.\n"
    return f"The interpreter ended with exit code {code}.\n"
