"""The smoke test of an image: a real sandbox starts from it and says which tools it has."""

from dataclasses import dataclass
from uuid import uuid4

from sandboxes.runtime.exceptions import (
    SandboxCancelled,
    SandboxFault,
    SandboxGone,
    StopFailed,
)
from sandboxes.runtime.protocol import Limits, SandboxSpec
from sandboxes.runtime.sessions import Cancelled
from sandboxes.services.node import node_runtime, sandbox_prefix

CHECK_SECONDS = 60.0
TOOLS = ("sh", "bash", "python3", "tar", "git")
_LOOK = 'for tool in "$@"; do command -v "$tool" >/dev/null 2>&1 && echo "$tool"; done; true'
# The node's sweep ends what no row owns, such as this sandbox: then it is started once more.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What came of a smoke test; `detail` is for operators."""

    ok: bool
    detail: str


def check_folder(folder: str, *, cancelled: Cancelled | None = None) -> CheckResult:
    """Start a sandbox from an unpacked image, look for its tools, and end it.

    Raises SandboxCancelled, and StopFailed when the sandbox stays.
    """
    for _ in range(_TRIES):
        try:
            return _check(folder, cancelled)
        except (SandboxCancelled, StopFailed):
            raise
        except SandboxGone:
            continue
        except SandboxFault as fault:
            return CheckResult(ok=False, detail=f"no sandbox starts from it: {fault}")
    return CheckResult(ok=False, detail="its sandbox ended by itself")


def _check(folder: str, cancelled: Cancelled | None) -> CheckResult:
    runtime = node_runtime()
    name = f"{sandbox_prefix()}{uuid4().hex}"
    spec = SandboxSpec(
        name=name, image=folder, workdir="/", limits=Limits(lifetime_seconds=3 * CHECK_SECONDS)
    )
    try:
        handle = runtime.start(spec, timeout_seconds=CHECK_SECONDS, cancelled=cancelled)
        result = runtime.exec(
            handle,
            ["/bin/sh", "-c", _LOOK, "sh", *TOOLS],
            timeout_seconds=CHECK_SECONDS,
            cancelled=cancelled,
        )
    finally:
        runtime.stop(name)
    if result.cancelled:
        raise SandboxCancelled("cancelled while the image was checked")
    found = result.stdout.decode("utf-8", "replace").split()
    if result.exit_code != 0 or "sh" not in found:
        said = result.stderr.decode("utf-8", "replace").strip()[-500:]
        return CheckResult(ok=False, detail=f"it has no working sh: {said}")
    missing = [tool for tool in TOOLS if tool not in found]
    lacks = f"; lacks {', '.join(missing)}" if missing else ""
    return CheckResult(ok=True, detail=f"has {', '.join(found)}{lacks}")
