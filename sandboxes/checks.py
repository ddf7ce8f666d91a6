"""System checks of the sandbox settings."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register

RUNTIMES = ("apptainer", "local")


@register()
def check_runtime(**_: Any) -> list[CheckMessage]:
    """Refuse a runtime that does not exist."""
    if settings.SANDBOX_RUNTIME in RUNTIMES:
        return []
    return [
        Error(
            f"PRORL_RUNTIME is {settings.SANDBOX_RUNTIME!r}.",
            hint=f"Set it to one of: {', '.join(RUNTIMES)}.",
            id="sandboxes.E001",
        )
    ]
