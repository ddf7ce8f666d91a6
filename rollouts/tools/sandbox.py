"""The episode's own sandbox, as tools reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandboxes.runtime.protocol import ExecResult, Runtime, SandboxHandle
    from sandboxes.runtime.sessions import PythonSession


class EpisodeSandbox:
    """Bind a runtime to one sandbox for one episode; see `SandboxAccess`. One thread at a time.

    `env` is what its programs need beside their own, such as a proxy. The interpreter is opened
    at first use; `close` ends it, not the sandbox.
    """

    def __init__(
        self,
        runtime: Runtime,
        handle: SandboxHandle,
        *,
        resumed: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._runtime = runtime
        self._handle = handle
        self._env = dict(env or {})
        self._resumed = resumed
        self._python: PythonSession | None = None

    @property
    def resumed(self) -> bool:
        """Tell whether another worker began this episode."""
        return self._resumed

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_seconds: float,
        output_bytes: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> ExecResult:
        """Run one program in `/`."""
        return self._runtime.exec(
            self._handle,
            argv,
            stdin=stdin,
            env=self._env,
            cwd="/",
            timeout_seconds=timeout_seconds,
            output_bytes=output_bytes,
            cancelled=cancelled,
        )

    def python(self) -> PythonSession:
        """Return the interpreter."""
        if self._python is None:
            self._python = self._runtime.open_python(self._handle, env=self._env)
        return self._python

    def close(self) -> None:
        """End the interpreter, if there is one; idempotent."""
        if self._python is not None:
            self._python.close()
            self._python = None
