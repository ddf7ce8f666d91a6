"""A runtime of scripted answers in memory, for tests of what stands above it."""

# ruff: noqa: ARG001, ARG002 - the protocol's arguments, most of which a script ignores

from __future__ import annotations

import itertools
import posixpath
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sandboxes.runtime.exceptions import (
    FileMissing,
    LayerMissing,
    OutputTooLarge,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.files import clean_path
from sandboxes.runtime.protocol import (
    DEFAULT_OUTPUT_BYTES,
    Cancelled,
    Check,
    Checks,
    CommandResult,
    ExecResult,
    SandboxHandle,
    SandboxSpec,
    ShellState,
)
from sandboxes.runtime.streams import HeadTail

Names = list[str]
Files = dict[str, tuple[bytes, int]]


@dataclass
class FakeSandbox:
    """Hold what one scripted sandbox knows; scripts may change `files` and `cwd`."""

    spec: SandboxSpec
    handle: SandboxHandle
    files: Files = field(default_factory=dict)
    cwd: str = "/app"
    commands: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """Hold a scripted answer to a program or a command."""

    output: str = ""
    exit_code: int | None = 0
    stderr: str = ""
    timed_out: bool = False
    shell_restarted: bool = False


Script = Callable[[FakeSandbox, str, bytes], Answer]
"""Answer (sandbox, command or space-joined argv, stdin)."""


def echo_script(sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
    """Answer every command with nothing and exit code 0."""
    return Answer()


class FakeRuntime:
    """Keep sandboxes in memory and answer through `script`; see `Runtime`.

    `fail_next` queues exceptions per method name, raised one per call. `calls` lists
    (method, sandbox name) in order.
    """

    def __init__(self, prefix: str = "", script: Script = echo_script) -> None:
        self.script = script
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.layers: dict[str, Files] = {}
        self.calls: list[tuple[str, str]] = []
        self._prefix = prefix
        self._faults: dict[str, list[Exception]] = {}
        self._pids = itertools.count(100_000_000)  # above the kernel's largest pid
        self._lock = threading.RLock()

    def fail_next(self, method: str, *faults: Exception) -> None:
        """Let the next calls of a method raise, in this order."""
        with self._lock:
            self._faults.setdefault(method, []).extend(faults)

    def prepare(self) -> None:
        """Do nothing: there is no process to start."""

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Make a sandbox that holds the files of its layers."""
        with self._lock:
            self._enter("start", spec.name)
            if not spec.name.startswith(self._prefix) or spec.name in self.sandboxes:
                raise StartFailed(f"not a free name under {self._prefix!r}: {spec.name!r}")
            found: Files = {}
            for reference in reversed(spec.layers):
                if reference not in self.layers:
                    raise LayerMissing(f"no layer {reference}")
                found |= self.layers[reference]
            handle = SandboxHandle(
                name=spec.name, pid=next(self._pids), start_ticks=1, layer=spec.name
            )
            self.sandboxes[spec.name] = FakeSandbox(spec, handle, found, spec.workdir)
            return handle

    def exec(
        self,
        handle: SandboxHandle,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> ExecResult:
        """Answer a program from the script."""
        with self._lock:
            sandbox = self._find("exec", handle)
            answer = self.script(sandbox, " ".join(argv), stdin)
        stdout, truncated = _cap(answer.output, output_bytes)
        return ExecResult(
            exit_code=None if answer.timed_out else answer.exit_code,
            stdout=stdout,
            stderr=answer.stderr.encode(),
            duration_seconds=0.0,
            truncated=truncated,
            timed_out=answer.timed_out,
        )

    def open_shell(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> FakeShell:
        """Open a scripted shell."""
        with self._lock:
            sandbox = self._find("open_shell", handle)
            sandbox.cwd = cwd or sandbox.spec.workdir
            return FakeShell(self, handle)

    def read_file(self, handle: SandboxHandle, path: str, *, max_bytes: int) -> bytes:
        """Read a file of the sandbox."""
        with self._lock:
            found = self._find("read_file", handle).files.get(clean_path(path))
        if found is None:
            raise FileMissing(f"no file {path} in the sandbox")
        if len(found[0]) > max_bytes:
            raise OutputTooLarge(f"{path} is larger than {max_bytes} bytes")
        return found[0]

    def write_file(
        self, handle: SandboxHandle, path: str, data: bytes, *, mode: int = 0o644
    ) -> None:
        """Write a file of the sandbox."""
        self.write_files(handle, {path: (data, mode)})

    def write_files(self, handle: SandboxHandle, files_: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files of the sandbox."""
        with self._lock:
            sandbox = self._find("write_files", handle)
            sandbox.files |= {clean_path(path): value for path, value in files_.items()}

    def freeze(self, handle: SandboxHandle) -> str:
        """End the sandbox and keep its files."""
        with self._lock:
            sandbox = self._find("freeze", handle)
            reference = f"layer-{handle.pid:032x}"
            self.layers[reference] = dict(sandbox.files)
            del self.sandboxes[handle.name]
            return reference

    def discard_layer(self, ref: str) -> None:
        """Forget a layer."""
        with self._lock:
            self._enter("discard_layer", ref)
            self.layers.pop(ref, None)

    def stop(self, name: str) -> None:
        """Forget a sandbox."""
        with self._lock:
            self._enter("stop", name)
            self.sandboxes.pop(name, None)

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the sandbox of the handle is there."""
        with self._lock:
            found = self.sandboxes.get(handle.name)
            return found is not None and found.handle == handle

    def list(self) -> list[str]:
        """Return the names, sorted."""
        with self._lock:
            return sorted(self.sandboxes)

    def list_layers(self) -> Names:
        """Return the references of the layers, sorted."""
        with self._lock:
            return sorted(self.layers)

    def check(self) -> Checks:
        """Say that this is the fake."""
        return [Check(name="fake", ok=True, detail="scripted sandboxes, nothing runs")]

    def close(self) -> None:
        """Do nothing."""

    def run_command(self, handle: SandboxHandle, command: str, output_bytes: int) -> CommandResult:
        """Answer a shell command from the script."""
        with self._lock:
            sandbox = self._find("run", handle)
            sandbox.commands.append(command)
            if command.startswith("cd "):
                sandbox.cwd = posixpath.normpath(posixpath.join(sandbox.cwd, command[3:].strip()))
            answer = self.script(sandbox, command, b"")
            output, truncated = _cap(answer.output, output_bytes)
            return CommandResult(
                output=output.decode(),
                exit_code=None if answer.timed_out else answer.exit_code,
                cwd=sandbox.cwd,
                duration_seconds=0.0,
                truncated=truncated,
                timed_out=answer.timed_out,
                shell_restarted=answer.shell_restarted,
            )

    def _enter(self, method: str, name: str) -> None:
        self.calls.append((method, name))
        queued = self._faults.get(method)
        if queued:
            raise queued.pop(0)

    def _find(self, method: str, handle: SandboxHandle) -> FakeSandbox:
        self._enter(method, handle.name)
        found = self.sandboxes.get(handle.name)
        if found is None or found.handle != handle:
            raise SandboxGone(f"sandbox {handle.name} no longer runs")
        return found


class FakeShell:
    """Pass commands to the runtime's script; see `ShellSession`."""

    def __init__(self, runtime: FakeRuntime, handle: SandboxHandle) -> None:
        self._runtime = runtime
        self._handle = handle
        self._state = ShellState(cwd=runtime.sandboxes[handle.name].cwd, exports="")

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Run a command through the script."""
        if cancelled is not None and cancelled():
            return CommandResult(
                output="", exit_code=None, cwd=self._state.cwd, duration_seconds=0.0, cancelled=True
            )
        result = self._runtime.run_command(self._handle, command, output_bytes)
        self._state = replace(self._state, cwd=result.cwd)
        return result

    def state(self) -> ShellState:
        """Return the directory after the last command."""
        return self._state

    def restore(self, state: ShellState) -> None:
        """Take over a directory."""
        self._state = state
        self._runtime.sandboxes[self._handle.name].cwd = state.cwd

    def close(self) -> None:
        """Do nothing."""


def _cap(text: str, limit: int) -> tuple[bytes, bool]:
    kept = HeadTail(limit)
    kept.feed(text.encode())
    return kept.joined(), kept.truncated
