"""Who calls: a trainer's token, or an operator's session."""

from typing import Any

from django.utils import timezone
from knox.auth import TokenAuthentication
from knox.settings import CONSTANTS
from rest_framework import exceptions
from rest_framework.authentication import SessionAuthentication
from rest_framework.request import Request

__all__ = ["CONSTANTS", "OperatorSessionAuthentication", "TrainerTokenAuthentication"]


class TrainerTokenAuthentication(TokenAuthentication):
    """Accept `Authorization: Bearer TOKEN`; expired and revoked tokens are refused."""

    def authenticate_credentials(self, token: bytes) -> tuple[Any, Any]:
        """Return the user and the token. Raises AuthenticationFailed."""
        user, found = super().authenticate_credentials(token)
        if found.revoked_at is not None:
            raise exceptions.AuthenticationFailed("This token was revoked. Ask for a new one.")
        now = timezone.now()
        if found.used_at is None or (now - found.used_at).total_seconds() > 60:
            type(found).objects.filter(pk=found.pk).update(used_at=now)
        return user, found


class OperatorSessionAuthentication(SessionAuthentication):
    """Accept the admin's session cookie, for staff only; unsafe calls need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[Any, None] | None:
        """Return the operator, or None when there is no staff session."""
        found = super().authenticate(request)
        if found is None or not found[0].is_staff:
            return None
        return found
