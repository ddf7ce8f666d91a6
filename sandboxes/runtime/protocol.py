"""The interface of every sandbox runtime and the values that cross it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, PythonSession, ShellSession

Network = Literal["none", "host"]
Gpu = Literal["", "nvidia", "rocm"]

DEFAULT_LIFETIME_SECONDS = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bound one sandbox; None leaves that resource unbounded.

    `memory_bytes` and `disk_bytes` bound the whole process tree and the writable layer;
    `cpus` are whole cores' worth of time, kept only where the node's cgroups can;
    `lifetime_seconds` is wall time from the start, kept even when every worker is gone.
    """

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    lifetime_seconds: float = DEFAULT_LIFETIME_SECONDS
    output_bytes: int = DEFAULT_OUTPUT_BYTES


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """Describe a sandbox to start.

    `name` carries the runtime's prefix. `image` is a SIF file or an unpacked folder.
    `layers` are references that `Runtime.freeze` returned, topmost first. `workdir` is
    made when missing and is where commands start. `hidden` are folders at the root that
    begin empty, whatever image and layers hold there, links included. `gpu` passes the
    host's devices and driver libraries through.
    """

    name: str
    image: str
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network = "none"
    gpu: Gpu = ""
    limits: Limits = field(default_factory=Limits)
    workdir: str = "/app"
    hidden: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able values."""
        return {
            "name": self.name,
            "image": self.image,
            "layers": list(self.layers),
            "env": dict(self.env),
            "network": self.network,
            "gpu": self.gpu,
            "limits": asdict(self.limits),
            "workdir": self.workdir,
            "hidden": list(self.hidden),
        }


@dataclass(frozen=True, kw_only=True)
class SandboxHandle:
    """Name a running sandbox; any process of this node can use it.

    `start_ticks` is field 22 of /proc/PID/stat and tells a reused pid apart.
    """

    name: str
    pid: int
    start_ticks: int
    layer: str

    def as_dict(self) -> dict[str, Any]:
        """Return the handle as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a handle from `as_dict`'s values; raises KeyError or ValueError."""
        return cls(
            name=str(data["name"]),
            pid=int(data["pid"]),
            start_ticks=int(data["start_ticks"]),
            layer=str(data["layer"]),
        )


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """Hold what one program left; `exit_code` is None when it did not end by itself.

    A program ended by signal N reports 128 + N, as a shell would.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    duration_seconds: float
    truncated: bool = False
    timed_out: bool = False
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """Hold one finding about this node; `remedy` is empty when `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


Checks = list[Check]
Names = list[str]


class Runtime(Protocol):
    """Start, enter, freeze and end sandboxes on this node; usable from many threads."""

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Start a sandbox.

        Raises ImageMissing, ImageUnusable, LayerMissing, StartFailed, StartTimeout,
        SandboxCancelled, RuntimeMissing; nothing is left behind then.
        """
        ...

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
        """Run one program in the sandbox; raises SandboxGone, EnterFailed.

        `output_bytes` caps each stream, head and tail are kept. `env` adds to the
        environment of the spec; `cwd` defaults to the workdir of the spec.
        """
        ...

    def open_shell(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        terminal: bool = True,
    ) -> ShellSession:
        """Open a shell: bash where the image has one, else sh; on pipes without `terminal`.

        Raises SandboxGone, EnterFailed, ShellFailed.
        """
        ...

    def open_python(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> PythonSession:
        """Open a persistent Python interpreter; raises SandboxGone, EnterFailed, PythonFailed."""
        ...

    def listen(self, handle: SandboxHandle, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` inside the sandbox's own network.

        Who accepts on it here talks to programs in there; port 0 takes a free one. Raises
        SandboxGone, EnterFailed.
        """
        ...

    def read_file(self, handle: SandboxHandle, path: str, *, max_bytes: int) -> bytes:
        """Read a file; raises FileMissing, FileFault, OutputTooLarge, SandboxGone."""
        ...

    def write_file(
        self, handle: SandboxHandle, path: str, data: bytes, *, mode: int = 0o644
    ) -> None:
        """Write a file and its missing parents; raises FileFault, SandboxGone."""
        ...

    def write_files(self, handle: SandboxHandle, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write many files, path to (content, mode), in one call; raises as `write_file`."""
        ...

    def freeze(self, handle: SandboxHandle, *, key: str = "") -> str:
        """End the sandbox and keep its writable layer read-only; returns its reference.

        With a `key` the layer is a prepared one, that `find_layer` finds and the cache evicts.
        """
        ...

    def snapshot(self, handle: SandboxHandle) -> str:
        """Copy the writable layer of a live sandbox, whose processes stand still meanwhile.

        Returns the reference of the new layer, to be used above the sandbox's own layers.
        """
        ...

    def cut_layers(
        self, layers: Sequence[str], *, folders: Sequence[str], sealed: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return layers, topmost first, that hold of what was written only these folders.

        `layers` are a frozen layer and those below it. The prepared ones among them stay as they
        are; new layers take the place of the others, to be discarded by the caller. Links in
        them that lead into a `sealed` folder lead nowhere. Raises LayerMissing, and ImageUnusable
        for what cannot be cut.
        """
        ...

    def layer_image(self, ref: str) -> str:
        """Return the image that a layer was written on; raises LayerMissing."""
        ...

    def find_layer(self, key: str) -> str | None:
        """Return the prepared layer of that key, and note that it was used now."""
        ...

    def hold_layer(
        self, key: str, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> AbstractContextManager[None]:
        """Wait to be the only one on this node who prepares the layer of that key.

        Raises StartTimeout, SandboxCancelled.
        """
        ...

    def evict_layers(self, *, keep_bytes: int) -> int:
        """Delete prepared layers in no use, least recently used first; return how many."""
        ...

    def layer_bytes(self) -> int:
        """Return the bytes that the prepared layers of this node take."""
        ...

    def image_key(self, image: str) -> str:
        """Return what tells the content of an image from another's; raises ImageMissing."""
        ...

    def find_image(self, image: str) -> str:
        """Return the form of an image that sandboxes start from; raises ImageMissing.

        A SIF file is unpacked for it, once on a node.
        """
        ...

    def warm(self, spec: SandboxSpec, *, timeout_seconds: float) -> str:
        """Start a sandbox ahead, to be handed out once by `start`; returns its name.

        Image, layers, network, GPU and workdir must be those of the later `start`.
        """
        ...

    def list_warm(self) -> dict[str, SandboxSpec]:
        """Return the sandboxes started ahead and not handed out yet, by name."""
        ...

    def discard_layer(self, ref: str) -> None:
        """Delete a frozen layer; idempotent. No running sandbox may use it."""
        ...

    def stop(self, name: str) -> None:
        """End a sandbox and delete its writable layer; idempotent, by name.

        Raises StopFailed when a process or the folder stays.
        """
        ...

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the very process of the handle still runs."""
        ...

    def list(self) -> list[str]:
        """Return the names that `stop` has something to do for, sorted; warm ones excepted."""
        ...

    def unguarded(self) -> Names:
        """Return the handed-out sandboxes that run though what keeps their limits was killed."""
        ...

    def sweep(self) -> None:
        """Remove what killed removals left; raises StopFailed."""
        ...

    def list_layers(self) -> Names:
        """Return the references of the frozen layers on this node, sorted."""
        ...

    def enforcement(self) -> dict[str, str]:
        """Return how this node keeps each limit: "cgroup v2", "cgroup v1", "watchdog", "rlimit"
        or "none", by the names of `Limits` without their units (memory, cpu, processes, disk).
        """
        ...

    def check(self) -> Checks:
        """Return what this node has and misses, each with how to mend it."""
        ...

    def close(self) -> None:
        """Let go of this process's resources; sandboxes go on running."""
        ...
