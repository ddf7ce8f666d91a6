"""Plain processes in a private folder: no isolation, for tests and debugging only.

Paths given to this runtime lie below the sandbox's folder, which commands find in
`PRORL_LOCAL_ROOT`. Where the host allows user namespaces, commands see the folder's /app, /tests
and the like under these names (see `view`); everything else that they touch is the host's, so this
is never offered to an untrusted policy. The image is not used. A layer is a copied folder.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandboxes.runtime import anchor, files, view
from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import SANDBOX_ENV, Words, program_argv, shell_argvs
from sandboxes.runtime.base import SpawnerRuntime
from sandboxes.runtime.exceptions import EnterFailed, SandboxGone
from sandboxes.runtime.interpreter import Interpreter
from sandboxes.runtime.layout import read_record
from sandboxes.runtime.processes import is_running, kill_marked
from sandboxes.runtime.program import run_program
from sandboxes.runtime.protocol import Check, Checks, ExecResult, SandboxHandle, SandboxSpec
from sandboxes.runtime.python_session import KernelSession, kernel_argv
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled
from sandboxes.runtime.shell import PersistentShell
from sandboxes.runtime.terminal import Terminal

_END_SECONDS = 2.0
_KILLED = 128 + 9


class LocalRuntime(SpawnerRuntime):
    """Run commands as `account` on the host itself; see `Runtime` for every method."""

    _START = "anchor"

    def __init__(self, root: Path, prefix: str, account: Account) -> None:
        super().__init__(root, prefix, account)
        self._unshare: str | None = None

    def prepare(self) -> None:
        """Start the spawner: call it before the worker starts threads."""
        self._spawner.start()
        unshare = view.find_unshare()
        if unshare is None:
            return
        probe, _entered = run_program(
            self._spawner,
            program_argv(view.probe_argv(unshare), cwd="/"),
            env=SANDBOX_ENV,
            stdin=b"",
            timeout_seconds=30,
            output_bytes=4096,
            cancelled=None,
        )
        if probe.exit_code == 0:
            self._unshare = unshare

    def start(
        self, spec: SandboxSpec, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> SandboxHandle:
        """Make the folder and its anchor process; see `Runtime.start`."""
        self._check_name(spec.name)
        found = spec.as_dict()
        return self._hand_out(found) or self._start(found, timeout_seconds, cancelled)

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
        """Run a program on the host; see `Runtime.exec`."""
        record = self._record(handle)
        command = program_argv(argv, cwd=self._place(handle.name, cwd, record))
        result, entered = run_program(
            self._spawner,
            self._seen(handle.name, command),
            env=self._env(record, env),
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            output_bytes=output_bytes,
            cancelled=cancelled,
        )
        if not entered and not (result.timed_out or result.cancelled):
            self._wait_for_the_end(handle, result.exit_code)
            raise EnterFailed(result.stderr.decode("utf-8", "replace")[-1000:])
        return result

    def open_shell(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        terminal: bool = True,
    ) -> PersistentShell:
        """Open a shell on the host; see `Runtime.open_shell`."""
        record = self._record(handle)
        ways = [
            functools.partial(
                Terminal,
                self._spawner,
                self._seen(handle.name, program),
                env=self._env(record, env),
                piped=not terminal,
            )
            for program in shell_argvs()
        ]
        start = self._place(handle.name, cwd, record)
        return PersistentShell(ways, functools.partial(self.alive, handle), start)

    def open_python(
        self,
        handle: SandboxHandle,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> KernelSession:
        """Open a Python interpreter on the host; see `Runtime.open_python`."""
        record = self._record(handle)
        program = program_argv(kernel_argv(), cwd=self._place(handle.name, cwd, record))
        start = functools.partial(
            Interpreter,
            self._spawner,
            self._seen(handle.name, program),
            env=self._env(record, env),
        )
        return KernelSession(start, functools.partial(self.alive, handle))

    def read_file(self, handle: SandboxHandle, path: str, *, max_bytes: int) -> bytes:
        """Read a file below the folder; see `Runtime.read_file`."""
        inside = self._inside(handle.name, files.clean_path(path))
        return files.read_file(self._file_execute(handle), inside, max_bytes)

    def write_file(
        self, handle: SandboxHandle, path: str, data: bytes, *, mode: int = 0o644
    ) -> None:
        """Write a file below the folder; see `Runtime.write_file`."""
        self.write_files(handle, {path: (data, mode)})

    def write_files(self, handle: SandboxHandle, files_: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files below the folder; see `Runtime.write_files`."""
        files.write_files(self._file_execute(handle), files_, root=self._inside(handle.name, ""))

    def image_key(self, image: str) -> str:
        """Return nothing: the image is not used."""
        del image
        return ""

    def find_image(self, image: str) -> str:
        """Return the image's own name: it is not used."""
        return image

    def alive(self, handle: SandboxHandle) -> bool:
        """Tell whether the anchor of the handle runs."""
        return is_running(handle.pid, handle.start_ticks)

    def check(self) -> Checks:
        """Say that nothing is isolated."""
        return [Check(name="local", ok=True, detail="commands run on this host, NOT isolated")]

    def enforcement(self) -> dict[str, str]:
        """Say that only the lifetime is kept; see `Runtime.enforcement`."""
        return dict.fromkeys(("memory", "cpu", "processes", "disk"), "none")

    def _before_end(self, name: str) -> None:
        kill_marked(f"{anchor.MARKER}={self._marker(name)}")

    def _inside(self, name: str, path: str) -> str:
        folder = str(anchor.folder_of(self._layout, name))
        return path if path.startswith(folder) else folder + path

    def _wait_for_the_end(self, handle: SandboxHandle, exit_code: int | None) -> None:
        """Raise SandboxGone when a program was killed on its way in because the sandbox ends."""
        deadline = time.monotonic() + (_END_SECONDS if exit_code == _KILLED else 0.0)
        while self.alive(handle) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._record(handle)

    def _place(self, name: str, cwd: str | None, record: dict[str, Any]) -> str:
        """Return the directory that a command starts in, by the name under which it is seen."""
        wanted = str(cwd or record["workdir"])
        return wanted if self._unshare else self._inside(name, wanted)

    def _seen(self, name: str, argv: Words) -> Words:
        if self._unshare is None:
            return argv
        folder = self._inside(name, "")
        place = str(self._layout.instance(name) / "view")
        return view.view_argv(self._unshare, folder, place, argv)

    def _marker(self, name: str) -> str:
        return str(self._layout.instance(name))

    def _env(self, record: dict[str, Any], env: Mapping[str, str] | None) -> dict[str, str]:
        folder = self._inside(record["name"], "")
        own = {"HOME": f"{folder}/root", "PRORL_LOCAL_ROOT": folder}
        own[anchor.MARKER] = self._marker(record["name"])
        return {**SANDBOX_ENV, **own, **record["env"], **(env or {})}

    def _record(self, handle: SandboxHandle) -> dict[str, Any]:
        record = read_record(self._layout.instance(handle.name) / "record.json")
        if not self.alive(handle) or record is None or record.get("pid") != handle.pid:
            raise SandboxGone(f"sandbox {handle.name} no longer runs")
        return record

    def _file_execute(self, handle: SandboxHandle) -> files.Execute:
        def execute(argv: Words, stdin: bytes, seconds: float, limit: int) -> ExecResult:
            return self.exec(
                handle, argv, stdin=stdin, cwd="/", timeout_seconds=seconds, output_bytes=limit
            )

        return execute
