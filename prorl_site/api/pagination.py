"""Cursor pagination."""

from typing import Any

from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request


class CreatedCursorPagination(CursorPagination):
    """Page through rows from the newest to the oldest; `page_size` up to 1000."""

    ordering = ("-created_at", "id")
    page_size_query_param = "page_size"
    max_page_size = 1000

    def decode_cursor(self, request: Request) -> Any:
        """Return the cursor's place. Raises ValidationError for one that is not ours."""
        try:
            return super().decode_cursor(request)
        except NotFound:
            raise ValidationError(
                {self.cursor_query_param: ["Not a cursor of this list."]}
            ) from None
