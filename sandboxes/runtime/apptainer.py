"""Rootless Apptainer instances, each over a kernel overlay of its own."""

from __future__ import annotations

import functools
import hashlib
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from sandboxes.runtime import doctor, files, keeper
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import (
    HOST_PATH,
    SANDBOX_ENV,
    Tools,
    Words,
    bash_argv,
    engine_env,
    engine_exec_argv,
    enter_argv,
    find_tools,
    program_argv,
)
from sandboxes.runtime.exceptions import (
    EnterFailed,
    ImageMissing,
    ImageUnusable,
    RuntimeMissing,
    SandboxGone,
    StartFailed,
    StartTimeout,
    StopFailed,
)
from sandboxes.runtime.jobs import KILL_SECONDS, REMOVE_SECONDS, UNPACK_SECONDS
from sandboxes.runtime.layout import NAME_PATTERN, Layout, make_root, read_record
from sandboxes.runtime.processes import ends_soon, is_running
from sandboxes.runtime.program import run_program
from sandboxes.runtime.protocol import (
    DEFAULT_OUTPUT_BYTES,
    Cancelled,
    Checks,
    ExecResult,
    Limits,
    Network,
    SandboxHandle,
    SandboxSpec,
)
from sandboxes.runtime.shell import BashSession
from sandboxes.runtime.spawner import Spawner
from sandboxes.runtime.terminal import Terminal

_STOP_SECONDS = KILL_SECONDS + REMOVE_SECONDS


class ApptainerRuntime:
    """Run sandboxes of one deployment below `root`; see `Runtime` for every method.

    `root` is made when missing and given to `account`; its parents must let the account
    pass. Names begin with `prefix`, and nothing of another name is touched.
    """

    def __init__(self, root: Path, prefix: str, account: Account) -> None:
        self._layout = Layout(root.absolute())
        self._prefix = prefix
        self._account = account
        self._lock = threading.Lock()
        self._found: Tools | None = None
        make_root(self._layout.root, account)
        self._spawner = Spawner(root=self._layout.root, account=account)

    @property
    def root(self) -> Path:
        """Return the folder that holds instances and layers."""
        return self._layout.root

    def prepare(self) -> None:
        """Start the spawner: call it before the worker starts threads; raises RuntimeMissing."""
        tools = self._tools()
        self._spawner.start()
        self._spawner.request({"op": "sweep", "tools": asdict(tools)}).close()  # not awaited

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Start an instance; see `Runtime.start`."""
        self._check_name(spec.name)
        if not spec.workdir.startswith("/"):
            raise StartFailed(f"workdir is not an absolute path: {spec.workdir!r}")
        image = self._find_image(Path(spec.image), cancelled)
        message = {
            "op": "start",
            "tools": asdict(self._tools()),
            "timeout_seconds": timeout_seconds,
            "spec": spec.as_dict() | {"image": str(image)},
        }
        result = self._spawner.run_job(
            message, timeout_seconds=timeout_seconds + KILL_SECONDS, cancelled=cancelled
        )
        return SandboxHandle(
            name=spec.name,
            pid=int(result["pid"]),
            start_ticks=int(result["start_ticks"]),
            layer=spec.name,
        )

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
        inside = SANDBOX_ENV | record["env"] | dict(env or {})
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
    ) -> BashSession:
        """Open a bash in the instance; see `Runtime.open_shell`."""
        record = self._record(handle)
        inside = SANDBOX_ENV | record["env"] | dict(env or {})
        words, outside = self._enter(record, bash_argv(), inside)
        open_terminal = functools.partial(
            Terminal, self._spawner, words, env=outside, limits=_rlimits(record)
        )
        return BashSession(
            open_terminal, functools.partial(self.alive, handle), cwd or record["workdir"]
        )

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

    def freeze(self, handle: SandboxHandle) -> str:
        """End the instance and keep its layer; see `Runtime.freeze`."""
        self._check_name(handle.name)
        result = self._job("freeze", name=handle.name)
        return str(result["reference"])

    def discard_layer(self, ref: str) -> None:
        """Delete a frozen layer; see `Runtime.discard_layer`."""
        self._job("discard", reference=ref)

    def stop(self, name: str) -> None:
        """End an instance by name; see `Runtime.stop`."""
        self._check_name(name)
        self._job("stop", name=name)

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the instance of the handle runs."""
        return is_running(handle.pid, handle.start_ticks)

    def list(self) -> list[str]:
        """Return the names below our prefix, the ended ones that were not stopped included."""
        return self._layout.names(self._prefix)

    def list_layers(self) -> Words:
        """Return the references of the frozen layers on this node, sorted."""
        return self._layout.references()

    def check(self) -> Checks:
        """Return what this node has and misses; starts nothing that stays."""
        return doctor.check_node(self._layout.root, self._account, self._spawner)

    def close(self) -> None:
        """End the spawner; instances go on."""
        self._spawner.close()

    def _job(self, kind: str, **details: Any) -> dict[str, Any]:
        message = {"op": kind, "tools": asdict(self._tools()), **details}
        try:
            return self._spawner.run_job(message, timeout_seconds=_STOP_SECONDS)
        except StartTimeout as fault:
            raise StopFailed(f"{kind} {details}: {fault}") from None

    def _tools(self) -> Tools:
        with self._lock:
            if self._found is None:
                self._found = find_tools()
            return self._found

    def _check_name(self, name: str) -> None:
        if not name.startswith(self._prefix) or not NAME_PATTERN.fullmatch(name):
            raise StartFailed(f"a sandbox name here begins with {self._prefix!r}: {name!r}")

    def _require(self, handle: SandboxHandle) -> None:
        if self.alive(handle):
            return
        ended = read_record(self._layout.instance(handle.name) / "ended.json") or {}
        reason = f" (ended at its limit: {ended['reason']})" if "reason" in ended else ""
        raise SandboxGone(
            f"sandbox {handle.name} no longer runs{reason}", limit=ended.get("reason")
        )

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
            return image
        if not image.is_file():
            raise ImageMissing(f"no image {image} on this node")
        unsquashfs = shutil.which("unsquashfs", path=HOST_PATH)
        if unsquashfs is None:
            raise RuntimeMissing("unsquashfs is missing: install squashfs-tools")
        try:
            key = _content_key(image, image.stat().st_mtime_ns)
        except PermissionError:
            raise ImageUnusable(f"{image} cannot be read") from None
        ready = self._layout.root / "images" / key
        if ready.is_dir():
            return ready
        result = self._spawner.run_job(
            {"op": "unpack", "source": str(image), "key": key, "unsquashfs": unsquashfs},
            timeout_seconds=UNPACK_SECONDS,
            cancelled=cancelled,
        )
        return Path(result["image"])


@functools.lru_cache(maxsize=256)
def _content_key(image: Path, _changed: int) -> str:
    with image.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _rlimits(record: dict[str, Any]) -> dict[str, int | None]:
    limits = Limits(**record["limits"])
    return {"processes": limits.processes, "file_bytes": limits.disk_bytes}
