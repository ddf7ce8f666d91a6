"""System checks of the sandbox settings."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

RUNTIMES = ("apptainer", "local", "fake")
OVERLAYS = ("auto", "kernel", "fuse")


@register()
def check_runtime(**_: Any) -> list[CheckMessage]:
    """Refuse a runtime that does not exist, and warn of the one that runs nothing."""
    if settings.SANDBOX_RUNTIME == "fake":
        return [
            Warning(
                "PRORL_RUNTIME is 'fake': nothing runs, every command is answered with nothing.",
                hint="It is for measuring what stands above sandboxes; rewards mean nothing.",
                id="sandboxes.W004",
            )
        ]
    if settings.SANDBOX_RUNTIME in RUNTIMES:
        return []
    return [
        Error(
            f"PRORL_RUNTIME is {settings.SANDBOX_RUNTIME!r}.",
            hint="Set it to one of: apptainer, local.",
            id="sandboxes.E001",
        )
    ]


@register()
def check_overlay(**_: Any) -> list[CheckMessage]:
    """Refuse a way to mount overlays that does not exist."""
    if settings.SANDBOX_OVERLAY in OVERLAYS:
        return []
    return [
        Error(
            f"PRORL_OVERLAY is {settings.SANDBOX_OVERLAY!r}.",
            hint=f"Set it to one of: {', '.join(OVERLAYS)}.",
            id="sandboxes.E002",
        )
    ]


@register()
def check_control_groups(**_: Any) -> list[CheckMessage]:
    """Refuse a place for control groups that is none."""
    wanted = settings.SANDBOX_CGROUPS
    if wanted in ("auto", "none") or wanted.startswith("/"):
        return []
    return [
        Error(
            f"PRORL_CGROUPS is {wanted!r}.",
            hint="Set it to auto, none, or the path of a delegated group of version 2.",
            id="sandboxes.E003",
        )
    ]
