"""Who calls: a token as everywhere, or one named account for calls that carry none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from rollouts.api.reference.surface import current_surface
from rollouts.models.token import Scope

# Behind these is not the one that the connection comes from: a proxy's caller, or a web page.
FOREIGN = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via", "Origin")


@dataclass(frozen=True)
class SurfaceGrant:
    """What a call without a token may do: what a trainer may."""

    scopes: tuple[str, ...] = (Scope.READ, Scope.SUBMIT, Scope.POLICY)
    is_bound: bool = False


class NamedAccountAuthentication(BaseAuthentication):
    """Take calls without a token for the account that the surface names, from its networks alone.

    The reference's trainers send no token. What came through a proxy, or from a page in a browser,
    is never taken: it would seem to come from that machine itself.
    """

    def authenticate(self, request: Request) -> tuple[Any, SurfaceGrant] | None:
        """Return the account, or None when the call is not to be trusted."""
        surface = current_surface()
        if surface is None or request.headers.get("Authorization"):
            return None
        if any(request.headers.get(name) for name in FOREIGN):
            return None
        if not surface.trusts(request.META.get("REMOTE_ADDR", "")):
            return None
        user = get_user_model().objects.filter(username=surface.account, is_active=True).first()
        if user is None:
            raise AuthenticationFailed(f"There is no active account {surface.account!r}.")
        return user, SurfaceGrant()
