"""The interface of every sandbox runtime and the values that cross it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

Network = Literal["none", "host"]
Cancelled = Callable[[], bool]

DEFAULT_OUTPUT_BYTES = 256 * 1024
DEFAULT_LIFETIME_SECONDS = 4 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bound one sandbox; None leaves that resource unbounded.

    `memory_bytes` and `disk_bytes` bound the whole process tree and the writable layer;
    `lifetime_seconds` is wall time from the start, kept even when every worker is gone.
    """

    memory_bytes: int | None = None
    processes: int | None = None
    disk_bytes: int | None = None
    lifetime_seconds: float = DEFAULT_LIFETIME_SECONDS
    output_bytes: int = DEFAULT_OUTPUT_BYTES


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """Describe a sandbox to start.

    `name` carries the runtime's prefix. `image` is a SIF file or an unpacked folder.
    `layers` are references that `Runtime.freeze` returned, topmost first. `workdir` is
    made when missing and is where commands start.
    """

    name: str
    image: str
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network: Network = "none"
    limits: Limits = field(default_factory=Limits)
    workdir: str = "/app"

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able values."""
        return {
            "name": self.name,
            "image": self.image,
            "layers": list(self.layers),
            "env": dict(self.env),
            "network": self.network,
            "limits": asdict(self.limits),
            "workdir": self.workdir,
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
class CommandResult:
    """Hold what one shell command left; terminal escapes are gone from `output`.

    `exit_code` is None when the command was interrupted. `shell_restarted` says that
    the shell ended, and a new one with the old directory and exports took its place.
    """

    output: str
    exit_code: int | None
    cwd: str
    duration_seconds: float
    truncated: bool = False
    timed_out: bool = False
    cancelled: bool = False
    shell_restarted: bool = False


@dataclass(frozen=True, kw_only=True)
class ShellState:
    """Hold what a new shell needs to go on: directory and `declare -px` text."""

    cwd: str
    exports: str

    def as_dict(self) -> dict[str, str]:
        """Return the state as JSON-able values."""
        return {"cwd": self.cwd, "exports": self.exports}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a state from `as_dict`'s values; raises KeyError."""
        return cls(cwd=str(data["cwd"]), exports=str(data["exports"]))


@dataclass(frozen=True, kw_only=True)
class Check:
    """Hold one finding about this node; `remedy` is empty when `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


Checks = list[Check]
Names = list[str]


class ShellSession(Protocol):
    """Keep one bash on a pseudo-terminal; state survives from command to command.

    One thread at a time.
    """

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Run a command; raises SandboxGone, ShellFailed.

        At the timeout, or when cancelled, the command is interrupted, then killed.
        """
        ...

    def state(self) -> ShellState:
        """Return directory and exports after the last command, without running one."""
        ...

    def restore(self, state: ShellState) -> None:
        """Take over a directory and exports; a missing directory leaves the present one."""
        ...

    def close(self) -> None:
        """End the shell and every process of its session; idempotent."""
        ...


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
    ) -> ShellSession:
        """Open a bash on a pseudo-terminal; raises SandboxGone, EnterFailed, ShellFailed."""
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

    def freeze(self, handle: SandboxHandle) -> str:
        """End the sandbox and keep its writable layer read-only; returns its reference."""
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
        """Return the names under our prefix that `stop` has something to do for, sorted."""
        ...

    def list_layers(self) -> Names:
        """Return the references of the frozen layers on this node, sorted."""
        ...

    def check(self) -> Checks:
        """Return what this node has and misses, each with how to mend it."""
        ...

    def close(self) -> None:
        """Let go of this process's resources; sandboxes go on running."""
        ...
