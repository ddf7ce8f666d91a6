"""Faults of getting an image onto a node; each class has a stable dotted code."""

from __future__ import annotations

from sandboxes.runtime import exceptions as runtime
from sandboxes.runtime.exceptions import SandboxFault


class ReferenceInvalid(SandboxFault):
    """Say that a text names no image source; nothing was run with it."""

    code = "sandbox.image_reference"


class ImageNetworkFault(SandboxFault):
    """Say that a registry could not be reached or broke off: worth another try."""

    code = "sandbox.image_network"


class ImagePullFailed(SandboxFault):
    """Say that a registry refused the image: unknown, forbidden, of another kind."""

    code = "sandbox.image_pull_failed"


class ImageBuildFailed(SandboxFault):
    """Say that a definition or template cannot be built as it is."""

    code = "sandbox.image_build_failed"


class ImageTimeout(SandboxFault):
    """Say that an image was not there within its time limit."""

    code = "sandbox.image_timeout"


class ImageDiskFull(SandboxFault):
    """Say that the node's disk cannot take the image."""

    code = "sandbox.image_disk_full"


class ImageWorkLost(SandboxFault):
    """Say that the process that worked on an image was killed from outside."""

    code = "sandbox.image_work_lost"


_FAULTS: dict[str, type[SandboxFault]] = {
    kind.code: kind
    for kind in (*vars(runtime).values(), *list(globals().values()))
    if isinstance(kind, type) and issubclass(kind, SandboxFault)
}

# Another try may go well without anybody's help; all else waits for an operator.
PASSING_CODES = frozenset({ImageNetworkFault.code, ImageWorkLost.code})


def fault_of(code: str, message: str) -> SandboxFault:
    """Return the fault of a code; a plain SandboxFault for one that nobody knows."""
    return _FAULTS.get(code, SandboxFault)(message)
