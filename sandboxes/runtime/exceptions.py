"""Faults of the sandbox runtime; each class has a stable dotted code."""

from __future__ import annotations

from typing import ClassVar


class SandboxFault(Exception):
    """Say that a sandbox could not do what was asked; `code` is stable."""

    code: ClassVar[str] = "sandbox.fault"


class RuntimeMissing(SandboxFault):
    """Say that this node cannot run sandboxes of the wanted kind."""

    code = "sandbox.runtime_missing"


class ImageMissing(SandboxFault):
    """Say that the image does not exist on this node."""

    code = "sandbox.image_missing"


class ImageUnusable(SandboxFault):
    """Say that the image exists and cannot be used as it is (owner, format)."""

    code = "sandbox.image_unusable"


class LayerMissing(SandboxFault):
    """Say that a referenced read-only layer does not exist on this node."""

    code = "sandbox.layer_missing"


class StartFailed(SandboxFault):
    """Say that the instance did not start; the message carries the tool's own words."""

    code = "sandbox.start_failed"


class StartTimeout(SandboxFault):
    """Say that the instance did not start within the time given."""

    code = "sandbox.start_timeout"


class SetupFailed(SandboxFault):
    """Say that a setup script in a sandbox failed or did not end in time."""

    code = "sandbox.setup_failed"

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class StopFailed(SandboxFault):
    """Say that an instance or its folder could not be removed."""

    code = "sandbox.stop_failed"


class SandboxGone(SandboxFault):
    """Say that the instance behind a handle no longer runs.

    `limit` names the limit that ended it (lifetime, memory, disk); None when none did, when it is
    not known, and when the node was at fault: its disk was nearly full, or the watchdog failed.
    """

    code = "sandbox.gone"

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class EnterFailed(SandboxFault):
    """Say that the instance runs and no command could be started in it."""

    code = "sandbox.enter_failed"


class ShellFailed(SandboxFault):
    """Say that an interactive shell could not be started or replaced."""

    code = "sandbox.shell_failed"


class PythonFailed(SandboxFault):
    """Say that a Python interpreter could not be started or replaced."""

    code = "sandbox.python_failed"


class FileMissing(SandboxFault):
    """Say that a path does not exist in the sandbox."""

    code = "sandbox.file_missing"


class FileFault(SandboxFault):
    """Say that a file in the sandbox could not be read or written."""

    code = "sandbox.file_fault"


class OutputTooLarge(SandboxFault):
    """Say that a file is larger than the reader allows."""

    code = "sandbox.output_too_large"


class SandboxCancelled(SandboxFault):
    """Say that the caller's `cancelled` turned true while a call waited."""

    code = "sandbox.cancelled"
