"""JSON bodies, bounded in size and depth."""

from collections.abc import Mapping
from typing import IO, Any

from django.conf import settings
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

from prorl_site.api.exceptions import Problem


class BoundedJSONParser(JSONParser):
    """Parse JSON of at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes."""

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the parsed body. Raises ParseError, or Problem 413 when it is too large."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        length = self._declared_length(parser_context)
        if length is not None and length > limit:
            raise Problem(
                413, "request.too_large", f"The body has {length} bytes; the limit is {limit}."
            )
        try:
            return super().parse(stream, media_type, parser_context)
        except RecursionError:
            raise ParseError("it is nested too deep.") from None

    @staticmethod
    def _declared_length(parser_context: Mapping[str, Any] | None) -> int | None:
        request = (parser_context or {}).get("request")
        value = request.META.get("CONTENT_LENGTH") if request is not None else None
        return int(value) if value else None
