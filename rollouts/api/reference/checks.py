"""System checks of the surface: its file is right, and who may call it without a token is said."""

from typing import Any

from django.core.checks import CheckMessage, Error, Warning, register

from rollouts.api.reference.surface import InvalidSurface, current_surface


@register()
def check_surface(**_: Any) -> list[CheckMessage]:
    """Refuse a wrong file; warn of calls without a token."""
    try:
        surface = current_surface()
    except InvalidSurface as error:
        return [
            Error(
                f"PRORL_REFERENCE_SURFACE: {error}",
                hint="See docs/trainers.md for what the file holds.",
                id="rollouts.E020",
            )
        ]
    if surface is None or not surface.account:
        return []
    networks = ", ".join(map(str, surface.networks))
    return [
        Warning(
            f"Calls of the reference surface without a token, from {networks}, act as the account "
            f"{surface.account}.",
            hint="Whoever can open a connection from there can start rollouts and register "
            "servers. Leave out `account` where the trainer can send a token.",
            id="rollouts.W021",
        )
    ]
