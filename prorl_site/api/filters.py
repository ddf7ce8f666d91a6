"""Filters of lists: a parameter that a list does not know is refused, not ignored."""

from typing import Any

from django_filters.rest_framework import DjangoFilterBackend
from rest_framework.exceptions import ValidationError


class StrictFilterBackend(DjangoFilterBackend):
    """Filter by the view's filter set, and refuse every other parameter."""

    def filter_queryset(self, request: Any, queryset: Any, view: Any) -> Any:
        """Return the matching rows. Raises ValidationError."""
        filterset_class = self.get_filterset_class(view, queryset)
        known = set(filterset_class.base_filters) if filterset_class is not None else set()
        paginator = getattr(view, "paginator", None)
        if paginator is not None:
            known |= {paginator.cursor_query_param, paginator.page_size_query_param}
        unknown = sorted(set(request.query_params) - known)
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            raise ValidationError(
                {name: [f"Unknown parameter; known: {names}."] for name in unknown}
            )
        return super().filter_queryset(request, queryset, view)
