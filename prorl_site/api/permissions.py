"""What a caller may do: scopes of tokens, staff for operators' calls."""

from typing import Any

from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request


class HasScope(BasePermission):
    """Require the view's scope of the token; a staff session has every scope.

    A view names `required_scope` for its unsafe methods (default `submit`) and may name
    `read_scope` (default `read`). The `operate` scope also needs a staff user.
    """

    message = "This token lacks the scope that the call needs."

    def has_permission(self, request: Request, view: Any) -> bool:
        """Return whether the caller has the scope of this call."""
        if not request.user or not request.user.is_authenticated:
            return False
        safe = request.method in SAFE_METHODS
        scope = getattr(view, "read_scope", "read") if safe else self._unsafe_scope(view)
        if scope == "operate" and not request.user.is_staff:
            self.message = "This call is for operators: it needs a staff account."
            return False
        if request.auth is None:
            return bool(request.user.is_staff)
        if scope in getattr(request.auth, "scopes", ()):
            return True
        self.message = f"This token lacks the scope '{scope}'."
        return False

    @staticmethod
    def _unsafe_scope(view: Any) -> str:
        by_action: dict[str, str] = getattr(view, "scope_of_action", {})
        default: str = getattr(view, "required_scope", "submit")
        return by_action.get(getattr(view, "action", None) or "", default)
