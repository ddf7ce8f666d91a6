"""Run an evaluator in a process of its own that can be killed at any instruction."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evaluators.base import (
    Artefacts,
    EvaluatorCancelled,
    EvaluatorCrashed,
    EvaluatorTimeout,
    JsonMap,
    Phase,
    Score,
)
from evaluators.registry import get_evaluator
from evaluators.surroundings import child_environment
from evaluators.wire import Kind, pack_request, unpack_outcome

PROJECT_ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.2
BACKSTOP_MARGIN_SECONDS = 2.0


def score(
    name: str,
    settings: JsonMap,
    payload: JsonMap,
    artefacts: Artefacts,
    *,
    timeout_seconds: float,
    cancelled: Callable[[], bool] | None = None,
) -> Score:
    """Score in a subprocess and return the result.

    Raises the evaluator's own fault, `UnknownEvaluator`, `EvaluatorTimeout` after
    `timeout_seconds`, `EvaluatorCancelled` within a fraction of a second of `cancelled()`, or
    `EvaluatorCrashed` when the process died. No process is left behind in any case.
    """
    found = _ask("score", name, settings, payload, artefacts, timeout_seconds, cancelled)
    if isinstance(found, Phase):
        raise EvaluatorCrashed(f"evaluator {name!r} answered with a phase, not with a score")
    return found


def advance(
    name: str,
    settings: JsonMap,
    payload: JsonMap,
    artefacts: Artefacts,
    *,
    timeout_seconds: float,
    cancelled: Callable[[], bool] | None = None,
) -> Score | Phase:
    """Return the phase that the evaluator wants next, or its score when it wants none.

    Raises as `score` does.
    """
    return _ask("advance", name, settings, payload, artefacts, timeout_seconds, cancelled)


def _ask(
    kind: Kind,
    name: str,
    settings: JsonMap,
    payload: JsonMap,
    artefacts: Artefacts,
    timeout_seconds: float,
    cancelled: Callable[[], bool] | None,
) -> Score | Phase:
    get_evaluator(name)
    backstop = timeout_seconds + BACKSTOP_MARGIN_SECONDS
    request = pack_request(name, settings, payload, artefacts, backstop, kind=kind)
    deadline = time.monotonic() + timeout_seconds
    process = subprocess.Popen(
        [sys.executable, "-E", "-s", "-B", "-m", "evaluators.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=PROJECT_ROOT,
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **child_environment()},
        start_new_session=True,
    )
    try:
        output, errors = _communicate(process, request, name, deadline, cancelled)
    finally:
        _end(process)
    if process.returncode != 0:
        message = errors.decode(errors="replace").strip()[-2000:]
        raise EvaluatorCrashed(
            f"evaluator {name!r} ended with status {process.returncode}", log=message
        )
    return unpack_outcome(output)


def _communicate(
    process: subprocess.Popen[bytes],
    request: bytes,
    name: str,
    deadline: float,
    cancelled: Callable[[], bool] | None,
) -> tuple[bytes, bytes]:
    to_send: bytes | None = request
    while True:
        wait = min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
        try:
            return process.communicate(to_send, timeout=wait)
        except subprocess.TimeoutExpired:
            to_send = None
        if cancelled is not None and cancelled():
            raise EvaluatorCancelled(f"evaluator {name!r} was cancelled")
        if time.monotonic() >= deadline:
            raise EvaluatorTimeout(f"evaluator {name!r} did not end within its time limit")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group; the leader is unreaped until `wait`, so its id is still ours."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
