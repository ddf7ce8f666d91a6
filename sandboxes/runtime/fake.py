"""A runtime of scripted answers in memory, for tests of what stands above it."""

# ruff: noqa: ARG001, ARG002 - the protocol's arguments, most of which a script ignores

from __future__ import annotations

import itertools
import posixpath
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from sandboxes.runtime.exceptions import (
    FileMissing,
    OutputTooLarge,
    SandboxCancelled,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.fake_layers import FakeLayers, Files
from sandboxes.runtime.fake_node import FakeNode
from sandboxes.runtime.fake_python import FakePython
from sandboxes.runtime.fake_shell import FakeShell
from sandboxes.runtime.files import clean_path
from sandboxes.runtime.layers import reference_of
from sandboxes.runtime.layout import NAME_PATTERN, PREPARED, WARM
from sandboxes.runtime.protocol import Check, Checks, ExecResult, SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, CommandResult
from sandboxes.runtime.streams import HeadTail
from sandboxes.runtime.warm import shape

Names = list[str]


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
    running: bool = False


Script = Callable[[FakeSandbox, str, bytes], Answer]
"""Answer (sandbox, command or space-joined argv, stdin)."""


def echo_script(sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
    """Answer every command with nothing and exit code 0."""
    return Answer()


class FakeRuntime:
    """Keep sandboxes in memory and answer through `script`; see `Runtime`.

    `fail_next` queues exceptions per method name, raised one per call. `calls` lists
    (method, sandbox name) in order.

    Runtimes over the same folder `shared` know of each other's sandboxes, as the processes of a
    node do; files and layers stay with the process that wrote them.
    """

    def __init__(
        self, prefix: str = "", script: Script = echo_script, *, shared: Path | None = None
    ) -> None:
        self.script = script
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.layers = FakeLayers(self._layers_in_use)
        self.calls: list[tuple[str, str]] = []
        self._prefix = prefix
        self._node = None if shared is None else FakeNode(shared)
        self._faults: dict[str, list[Exception]] = {}
        self._warm: dict[str, SandboxSpec] = {}
        self._pids = itertools.count(100_000_000)  # above the kernel's largest pid
        self._lock = threading.RLock()

    def fail_next(self, method: str, *faults: Exception) -> None:
        """Let the next calls of a method raise, in this order."""
        with self._lock:
            self._faults.setdefault(method, []).extend(faults)

    def prepare(self) -> None:
        """Make the folder that a node's processes share; there is no process to start."""
        if self._node is not None:
            self._node.prepare()

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Make a sandbox that holds the files of its layers."""
        with self._lock:
            self._enter("start", spec.name)
            self._check_name(spec.name)
            if self._look_up(spec.name) is not None:
                raise StartFailed(f"the name {spec.name} is in use")
            if cancelled is not None and cancelled():
                raise SandboxCancelled(f"the start of {spec.name} was given up")
            below = tuple(f"{folder}/" for folder in spec.hidden)
            found = self.layers.merged(spec.layers)
            found = {path: value for path, value in found.items() if not path.startswith(below)}
            handle = SandboxHandle(
                name=spec.name, pid=next(self._pids), start_ticks=1, layer=spec.name
            )
            fits = [n for n, ahead in self._warm.items() if shape(ahead) == shape(spec)]
            for name in fits[:1]:
                del self._warm[name]
            self.sandboxes[spec.name] = FakeSandbox(spec, handle, found, spec.workdir)
            if self._node is not None:
                self._node.add(spec, handle)
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
        terminal: bool = True,
    ) -> FakeShell:
        """Open a scripted shell."""
        with self._lock:
            sandbox = self._find("open_shell", handle)
            sandbox.cwd = cwd or sandbox.spec.workdir
            return FakeShell(self, handle)

    def open_python(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> FakePython:
        """Open a scripted interpreter."""
        with self._lock:
            self._find("open_python", handle)
            return FakePython(partial(self.exec, handle))

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

    def freeze(self, handle: SandboxHandle, *, key: str = "") -> str:
        """End the sandbox and keep its files."""
        with self._lock:
            sandbox = self._find("freeze", handle)
            reference = reference_of(key) if key else f"layer-{handle.pid:032x}"
            self._forget(handle.name)
            return self.layers.keep(
                reference, sandbox.files, sandbox.spec.layers, image=sandbox.spec.image
            )

    def snapshot(self, handle: SandboxHandle) -> str:
        """Copy the sandbox's files."""
        with self._lock:
            sandbox = self._find("snapshot", handle)
            reference = f"layer-{next(self._pids):032x}"
            return self.layers.keep(
                reference, sandbox.files, sandbox.spec.layers, image=sandbox.spec.image
            )

    def cut_layers(
        self, layers: Sequence[str], *, folders: Sequence[str], sealed: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Keep the files below these folders, of the written layers, as one new layer."""
        with self._lock:
            self._enter("cut_layers", layers[0])
            below = tuple(name for name in layers if name.startswith(PREPARED))
            written = tuple(name for name in layers if not name.startswith(PREPARED))
            if not written:
                return below
            inside = tuple(f"{folder.rstrip('/')}/" for folder in folders)
            found = self.layers.merged(written)
            kept = {path: value for path, value in found.items() if path.startswith(inside)}
            reference = f"layer-{next(self._pids):032x}"
            image = self.layers.image(written[0])
            return (self.layers.keep(reference, kept, below, image=image), *below)

    def layer_image(self, ref: str) -> str:
        """Return the image below a layer."""
        return self.layers.image(ref)

    def find_layer(self, key: str) -> str | None:
        """Return the prepared layer of a key."""
        self._enter("find_layer", key)
        return self.layers.find(key)

    def hold_layer(
        self, key: str, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> AbstractContextManager[None]:
        """Hold a lock of that key."""
        return self.layers.hold(key, timeout_seconds=timeout_seconds, cancelled=cancelled)

    def evict_layers(self, *, keep_bytes: int) -> int:
        """Forget the oldest prepared layers that nothing lies upon."""
        return self.layers.evict(keep_bytes)

    def layer_bytes(self) -> int:
        """Return the bytes in the prepared layers."""
        return self.layers.size()

    def image_key(self, image: str) -> str:
        """Return the image's own name."""
        return image

    def find_image(self, image: str) -> str:
        """Return the image's own name."""
        return image

    def warm(self, spec: SandboxSpec, *, timeout_seconds: float) -> str:
        """Remember a sandbox that the next fitting start takes."""
        with self._lock:
            self._enter("warm", spec.name)
            name = f"{self._prefix}{WARM}{next(self._pids)}"
            self._warm[name] = replace(spec, name=name)
            return name

    def list_warm(self) -> dict[str, SandboxSpec]:
        """Return what was started ahead and not taken."""
        with self._lock:
            return dict(self._warm)

    def listen(self, handle: SandboxHandle, port: int) -> socket.socket:
        """Listen on the host's loopback."""
        with self._lock:
            self._find("listen", handle)
        return socket.create_server(("127.0.0.1", port))

    def discard_layer(self, ref: str) -> None:
        """Forget a layer."""
        with self._lock:
            self._enter("discard_layer", ref)
            self.layers.discard(ref)

    def stop(self, name: str) -> None:
        """Forget a sandbox."""
        with self._lock:
            self._enter("stop", name)
            self._check_name(name)
            self._warm.pop(name, None)
            self._forget(name)

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the sandbox of the handle is there."""
        with self._lock:
            found = self._look_up(handle.name)
            return found is not None and found.handle == handle

    def list(self) -> list[str]:
        """Return the names, sorted."""
        with self._lock:
            return sorted(self.sandboxes if self._node is None else self._node.names())

    def unguarded(self) -> Names:
        """Return nothing: no process keeps a limit."""
        return []

    def sweep(self) -> None:
        """Note the call: nothing is left behind in memory."""
        with self._lock:
            self._enter("sweep", "")

    def list_layers(self) -> Names:
        """Return the references of the layers, the prepared ones excepted, sorted."""
        return self.layers.frozen()

    def enforcement(self) -> dict[str, str]:
        """Say that no limit is kept."""
        return dict.fromkeys(("memory", "cpu", "processes", "disk"), "none")

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
                exit_code=None if answer.timed_out or answer.running else answer.exit_code,
                cwd=sandbox.cwd,
                duration_seconds=0.0,
                truncated=truncated,
                timed_out=answer.timed_out,
                shell_restarted=answer.shell_restarted,
                running=answer.running,
            )

    def _layers_in_use(self) -> set[str]:
        with self._lock:
            specs = [sandbox.spec for sandbox in self.sandboxes.values()]
            return {name for spec in (*specs, *self._warm.values()) for name in spec.layers}

    def _check_name(self, name: str) -> None:
        if not name.startswith(self._prefix) or not NAME_PATTERN.fullmatch(name):
            raise StartFailed(f"a sandbox name here begins with {self._prefix!r}: {name!r}")

    def _enter(self, method: str, name: str) -> None:
        self.calls.append((method, name))
        queued = self._faults.get(method)
        if queued:
            raise queued.pop(0)

    def _find(self, method: str, handle: SandboxHandle) -> FakeSandbox:
        self._enter(method, handle.name)
        found = self._look_up(handle.name)
        if found is None or found.handle != handle:
            raise SandboxGone(f"sandbox {handle.name} no longer runs")
        return found

    def _look_up(self, name: str) -> FakeSandbox | None:
        """Return a sandbox of this process, or take over one that another process started."""
        if self._node is not None and not self._node.has(name):
            self.sandboxes.pop(name, None)  # another process ended it
        if name not in self.sandboxes and self._node is not None:
            found = self._node.find(name)
            if found is not None:
                self.sandboxes[name] = FakeSandbox(*found, cwd=found[0].workdir)
        return self.sandboxes.get(name)

    def _forget(self, name: str) -> None:
        self.sandboxes.pop(name, None)
        if self._node is not None:
            self._node.remove(name)


def _cap(text: str, limit: int) -> tuple[bytes, bool]:
    kept = HeadTail(limit)
    kept.feed(text.encode())
    return kept.joined(), kept.truncated
