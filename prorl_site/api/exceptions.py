"""The error that carries a problem's members."""

from typing import Any

from rest_framework.exceptions import APIException


class Problem(APIException):
    """An error with a stable code: raise it from a view, or map a service's exception to it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after: float | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(detail, code)
        self.status_code = status
        self.code = code
        self.retry_after = retry_after
        self.extra = extra
