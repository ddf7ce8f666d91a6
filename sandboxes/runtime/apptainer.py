"""Rootless Apptainer instances, each over a kernel overlay of its own."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sandboxes.images.specs import ImageSpec
from sandboxes.images.store import ImageStore
from sandboxes.runtime import cgroups, delegation, doctor, files, keeper
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import (
    GPU_ENV,
    SANDBOX_ENV,
    Overlay,
    Tools,
    Words,
    engine_env,
    engine_exec_argv,
    enter_argv,
    find_tools,
    program_argv,
    shell_argvs,
)
from sandboxes.runtime.base import SpawnerRuntime
from sandboxes.runtime.delegation import Delegation, enforcement
from sandboxes.runtime.exceptions import (
    EnterFailed,
    ImageMissing,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.interpreter import Interpreter
from sandboxes.runtime.layout import read_record
from sandboxes.runtime.overlay import known_driver
from sandboxes.runtime.processes import ends_soon, is_running
from sandboxes.runtime.program import run_program
from sandboxes.runtime.protocol import (
    Checks,
    ExecResult,
    Limits,
    Network,
    SandboxHandle,
    SandboxSpec,
)
from sandboxes.runtime.python_session import KernelSession, kernel_argv
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled
from sandboxes.runtime.shell import PersistentShell
from sandboxes.runtime.terminal import Terminal
from sandboxes.runtime.usage import OWN_LIMITS

_UNPACK_SECONDS = 900.0


_END_NOTE_SECONDS = 2.0


class ApptainerRuntime(SpawnerRuntime):
    """Run sandboxes of one deployment below `root`; see `Runtime` for every method."""

    _START = "start"

    def __init__(
        self,
        root: Path,
        prefix: str,
        account: Account,
        *,
        groups: str = delegation.AUTO,
        engine: str = "",
        overlay: Overlay = "auto",
    ) -> None:
        """Keep instances below `root`.

        `groups` is `Delegation.wanted`; `engine` and `overlay` are `find_tools`' own.
        """
        super().__init__(root, prefix, account)
        self._delegation = Delegation(self._layout.root, account, groups)
        self._engine = engine
        self._overlay: Overlay = overlay
        self._lock = threading.Lock()
        self._found: Tools | None = None
        self._images = ImageStore(self._layout.root, account)

    def prepare(self) -> None:
        """Start the spawner: call it before the worker starts threads; raises RuntimeMissing."""
        tools = self._tools()
        self._spawner.start()
        message = {"op": "sweep", "tools": asdict(tools), "cgroups": self._delegated()}
        self._spawner.request(message).close()  # not awaited

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Start an instance, or hand out one started ahead; see `Runtime.start`."""
        self._check_name(spec.name)
        if not spec.workdir.startswith("/"):
            raise StartFailed(f"workdir is not an absolute path: {spec.workdir!r}")
        found = self._described(spec, cancelled)
        return self._hand_out(found) or self._start(found, timeout_seconds, cancelled)

    def find_image(self, image: str) -> str:
        """Return the folder that sandboxes of an image start from; see `Runtime.find_image`."""
        return str(self._find_image(Path(image), None))

    def image_key(self, image: str) -> str:
        """Return what tells an image's content from another's; see `Runtime.image_key`."""
        path = Path(image).absolute()
        cached = self._images.note_use(path)
        if cached:
            return cached
        if path.is_file():
            return _content_key(path, path.stat().st_mtime_ns)
        digest = path / ".singularity.d" / "digest"
        try:
            if digest.is_file():
                return digest.read_text().strip()[:128]
            stat = path.stat()
        except OSError as fault:
            raise ImageMissing(f"no image {path} on this node: {fault.strerror}") from None
        return f"{path}:{stat.st_ino}:{stat.st_mtime_ns}"

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
        """Run a program in the instance; see `Runtime.exec`."""
        record = self._record(handle)
        program = program_argv(argv, cwd=cwd or record["workdir"])
        inside = _environment(record, env)
        words, outside = self._enter(record, program, inside)
        result, entered = run_program(
            self._spawner,
            words,
            env=outside,
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            output_bytes=output_bytes,
            cancelled=cancelled,
            limits=_rlimits(record),
        )
        if not entered and not (result.timed_out or result.cancelled):
            if ends_soon(functools.partial(self.alive, handle)):
                self._require(handle)
            detail = result.stderr.decode("utf-8", "replace").strip()[-1000:]
            raise EnterFailed(f"{handle.name}: {detail or f'exit {result.exit_code}'}")
        return result

    def open_shell(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        terminal: bool = True,
    ) -> PersistentShell:
        """Open a shell in the instance; see `Runtime.open_shell`."""
        record = self._record(handle)
        inside = _environment(record, env)

        def open_terminal(program: Words) -> Terminal:
            words, outside = self._enter(record, program, inside)
            limits = _rlimits(record)
            return Terminal(self._spawner, words, env=outside, limits=limits, piped=not terminal)

        return PersistentShell(
            [functools.partial(open_terminal, program) for program in shell_argvs()],
            functools.partial(self.alive, handle),
            cwd or record["workdir"],
            require=functools.partial(self._require, handle),
        )

    def open_python(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> KernelSession:
        """Open a Python interpreter in the instance; see `Runtime.open_python`."""
        record = self._record(handle)
        program = program_argv(kernel_argv(), cwd=cwd or record["workdir"])
        words, outside = self._enter(record, program, _environment(record, env))
        start = functools.partial(
            Interpreter, self._spawner, words, env=outside, limits=_rlimits(record)
        )
        return KernelSession(start, functools.partial(self.alive, handle))

    def read_file(self, handle: SandboxHandle, path: str, *, max_bytes: int) -> bytes:
        """Read a file; see `Runtime.read_file`."""
        return files.read_file(self._file_execute(handle), path, max_bytes)

    def write_file(
        self, handle: SandboxHandle, path: str, data: bytes, *, mode: int = 0o644
    ) -> None:
        """Write a file; see `Runtime.write_file`."""
        self.write_files(handle, {path: (data, mode)})

    def write_files(self, handle: SandboxHandle, files_: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files; see `Runtime.write_files`."""
        files.write_files(self._file_execute(handle), files_)

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the instance of the handle runs."""
        return is_running(handle.pid, handle.start_ticks)

    def check(self) -> Checks:
        """Return what this node has and misses; starts nothing that stays."""
        return doctor.check_node(
            self._layout.root, self._account, self._spawner, self.enforcement(), self._tools
        )

    def enforcement(self) -> dict[str, str]:
        """Return how each limit is kept here; see `Runtime.enforcement`."""
        return enforcement(self._delegated(), self._delegation.version)

    def close(self) -> None:
        """End the spawner; instances go on."""
        super().close()
        self._delegation.close()

    def _delegated(self) -> dict[str, str]:
        return self._delegation.folders(self._spawner.pid)

    def _driver(self) -> str:
        return known_driver(self._layout, self._tools())

    def _tool_paths(self) -> dict[str, Any]:
        return asdict(self._tools())

    def _described(self, spec: SandboxSpec, cancelled: Cancelled | None) -> dict[str, Any]:
        image = str(self._find_image(Path(spec.image), cancelled))
        # A folder may be built anew in its place: what was started ahead is of the old one then.
        return spec.as_dict() | {"image": image, "image_key": self.image_key(image)}

    def _tools(self) -> Tools:
        with self._lock:
            if self._found is None:
                self._found = find_tools(engine=self._engine, overlay=self._overlay)
            return self._found

    def _require(self, handle: SandboxHandle) -> None:
        if self.alive(handle):
            return
        reason = self._why_ended(handle.name)
        own = reason in OWN_LIMITS
        why = f" (ended at its limit: {reason})" if own else f" (ended: {reason})" if reason else ""
        raise SandboxGone(
            f"sandbox {handle.name} no longer runs{why}", limit=reason if own else None
        )

    def _why_ended(self, name: str) -> str:
        """Return what the keeper wrote, waiting a moment: the kernel ends an instance as well."""
        folder = self._layout.instance(name)
        record = read_record(folder / "record.json") or {}
        keeper, ticks = int(record.get("keeper_pid", 0)), int(record.get("keeper_ticks", 0))
        deadline = time.monotonic() + _END_NOTE_SECONDS
        while True:
            guarded = is_running(keeper, ticks)
            ended = read_record(folder / "ended.json")
            if ended is not None or not guarded or time.monotonic() > deadline:
                return str((ended or {}).get("reason", ""))
            time.sleep(0.01)

    def _record(self, handle: SandboxHandle) -> dict[str, Any]:
        self._require(handle)
        record = read_record(self._layout.instance(handle.name) / "record.json")
        if record is None or record.get("pid") != handle.pid:
            raise SandboxGone(f"sandbox {handle.name} is another one now")
        return record

    def _enter(
        self, record: dict[str, Any], program: Words, inside: dict[str, str]
    ) -> tuple[Words, dict[str, str]]:
        """Return the command line that runs `program` inside, and its outer environment."""
        tools = self._tools()
        if record["entry"] == keeper.ENTRY_ENGINE:
            outer = engine_exec_argv(tools, name=record["name"], env=inside)
            return [*outer, *program], engine_env(self._layout.root)
        network = cast(Network, record["network"])
        return [*enter_argv(tools, pid=record["pid"], network=network), *program], inside

    def _file_execute(self, handle: SandboxHandle) -> files.Execute:
        def execute(argv: Words, stdin: bytes, seconds: float, limit: int) -> ExecResult:
            return self.exec(
                handle, argv, stdin=stdin, cwd="/", timeout_seconds=seconds, output_bytes=limit
            )

        return execute

    def _find_image(self, image: Path, cancelled: Cancelled | None) -> Path:
        image = image.absolute()
        if image.is_dir():
            self._images.note_use(image)
            return image
        if not image.is_file():
            raise ImageMissing(f"no image {image} on this node")
        spec = ImageSpec(name=image.name, source=str(image))
        found = self._images.find(spec) or self._images.get(
            spec, timeout_seconds=_UNPACK_SECONDS, cancelled=cancelled
        )
        return Path(found.folder)


@functools.lru_cache(maxsize=256)
def _content_key(image: Path, _changed: int) -> str:
    with image.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _environment(record: dict[str, Any], env: Mapping[str, str] | None) -> dict[str, str]:
    gpu = GPU_ENV if record.get("gpu") else {}
    return {**SANDBOX_ENV, **gpu, **record["env"], **(env or {})}


def _rlimits(record: dict[str, Any]) -> dict[str, Any]:
    limits, groups = Limits(**record["limits"]), record.get("cgroups") or {}
    most = limits.processes
    if most is not None:
        most = None if "pids" in groups else most + int(record.get("resting_tasks", 0))
    return {
        "processes": most,
        "file_bytes": limits.disk_bytes,
        "cgroups": cgroups.entrances(groups),
        "launcher": record["name"],
    }
