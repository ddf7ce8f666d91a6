"""A persistent Python in the sandbox: ours against an IPython kernel through its own client."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.sandbox.guests import GUEST_FOLDER, guest_sandbox
from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import START_SECONDS, Stage, WayLacking
from benchmarks.sandbox.ways import CALL_SECONDS, OUTPUT_BYTES, WayBroken
from sandboxes.runtime.argv import SANDBOX_ENV
from sandboxes.runtime.protocol import SandboxHandle

SECTION = "python"
START = "start"
OURS, JUPYTER = "ours: open_python", "ipykernel through jupyter_client"
CELLS = {"1+1": "1+1", "print 1 MB": "print(('x' * 99 + '\\n') * 10000, end='')"}
_ANSWERS = {"1+1": "2", "print 1 MB": "x" * 99}
_LEAST_CHARACTERS = {"1+1": 1, "print 1 MB": 1_000_000}


class Interpreter(Protocol):
    """Run cells one after the other."""

    def run(self, code: str) -> str:
        """Run a cell; returns what it printed and its value's text."""
        ...

    def close(self) -> None:
        """End the interpreter."""
        ...


class OurPython:
    """Keep the runtime's own interpreter, with the same IPython as the kernel's."""

    def __init__(self, stage: Stage, handle: SandboxHandle) -> None:
        self._session = stage.runtime.open_python(handle, env={"PYTHONPATH": GUEST_FOLDER})
        if self._session.kind != "ipython":
            raise WayBroken(f"the interpreter is no IPython but {self._session.kind}")

    def run(self, code: str) -> str:
        """Run a cell; see `Interpreter.run`."""
        result = self._session.run(code, timeout_seconds=CALL_SECONDS, output_bytes=OUTPUT_BYTES)
        return result.output

    def close(self) -> None:
        """End the interpreter."""
        self._session.close()


class JupyterPython:
    """Keep an ipykernel in the sandbox and its blocking client on the host, on TCP."""

    def __init__(self, stage: Stage, handle: SandboxHandle) -> None:
        client = import_client()
        name = stage.new_name()
        path = stage.folder / f"{name}.json"
        client.write_connection_file(str(path), ip="127.0.0.1")
        inside = f"/tmp/{name}.json"
        stage.runtime.write_file(handle, inside, path.read_bytes(), mode=0o600)
        self._stage = stage
        self._process: subprocess.Popen[bytes] = stage.spawn(
            [
                *stage.entry(handle.pid, network="host"),
                *("python3", "-m", "ipykernel_launcher", "-f", inside),
            ],
            env=SANDBOX_ENV | {"PYTHONPATH": GUEST_FOLDER},
        )
        self._client = self._connect(client, path)

    def run(self, code: str) -> str:
        """Run a cell; see `Interpreter.run`."""
        parts: list[str] = []

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                parts.append(content["text"])
            elif message["msg_type"] == "execute_result":
                parts.append(content["data"]["text/plain"])

        self._client.execute_interactive(
            code, timeout=CALL_SECONDS, allow_stdin=False, output_hook=take
        )
        return "".join(parts)

    def close(self) -> None:
        """End the client and the kernel."""
        self._client.stop_channels()
        self._stage.end(self._process)

    def _connect(self, client: Any, path: Path) -> Any:
        made = client.BlockingKernelClient(connection_file=str(path))
        made.load_connection_file()
        # Its heartbeat calls a kernel dead that takes more than a second to start.
        made.start_channels(hb=False)
        try:
            made.wait_for_ready(timeout=START_SECONDS)
        except BaseException:
            made.stop_channels()
            self._stage.end(self._process)
            raise
        return made


def import_client() -> Any:
    """Return the module jupyter_client; raises WayLacking."""
    try:
        # Not a plain import: only requirements-bench.txt brings it.
        return importlib.import_module("jupyter_client")
    except ImportError:
        raise WayLacking("jupyter_client is missing: install requirements-bench.txt") from None


def measure(stage: Stage) -> list[Measure]:
    """Time starts, then cells in one interpreter of each way; both are in one sandbox."""
    samples = Samples(SECTION, subjects=(START, *CELLS), ways=(JUPYTER, OURS))
    ways: dict[str, Callable[[Stage, SandboxHandle], Interpreter]] = {OURS: OurPython}
    try:
        import_client()
        ways[JUPYTER] = JupyterPython
    except WayLacking as reason:
        stage.note(f"Not measured: {JUPYTER}: {reason}")
    try:
        with guest_sandbox(stage) as handle, ExitStack() as stack:
            for _, label in stage.rounds("python starts", list(ways), 10):
                made = samples.time(START, label, partial(ways[label], stage, handle))
                made.close()
            opened: dict[str, Interpreter] = {}
            for label, way in ways.items():
                opened[label] = way(stage, handle)
                stack.callback(opened[label].close)
                for subject, code in CELLS.items():
                    _check(label, subject, opened[label].run(code))
            turns = [(label, subject) for label in ways for subject in CELLS]
            for _, (label, subject) in stage.rounds("python cells", turns, 60):
                samples.time(subject, label, partial(opened[label].run, CELLS[subject]))
    except WayLacking as reason:
        stage.note(f"Not measured: {SECTION}: {reason}")
    return samples.measures()


def _check(label: str, subject: str, output: str) -> None:
    if _ANSWERS[subject] not in output or len(output) < _LEAST_CHARACTERS[subject]:
        raise WayBroken(f"{label}: {subject} gave {len(output)} characters: {output[-200:]!r}")
