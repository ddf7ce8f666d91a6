"""An interpreter of scripted answers, for tests of what stands above interpreters."""

from __future__ import annotations

from collections.abc import Callable

from sandboxes.runtime.protocol import ExecResult
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, PythonResult


class FakePython:
    """Answer each cell as `execute` answers a program of that one word; see `PythonSession`.

    Its standard error is the traceback.
    """

    kind = "ipython"

    def __init__(self, execute: Callable[..., ExecResult]) -> None:
        self._execute = execute

    def run(
        self,
        code: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> PythonResult:
        """Run a cell through the script."""
        if cancelled is not None and cancelled():
            return PythonResult(output="", duration_seconds=0.0, cancelled=True)
        result = self._execute([code], timeout_seconds=timeout_seconds, output_bytes=output_bytes)
        return PythonResult(
            output=result.stdout.decode(),
            error=result.stderr.decode(),
            duration_seconds=0.0,
            truncated=result.truncated,
            timed_out=result.timed_out,
        )

    def close(self) -> None:
        """Do nothing."""
