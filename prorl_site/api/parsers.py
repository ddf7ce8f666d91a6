"""JSON bodies that can be followed, stored and sent again; Django bounds their size."""

import math
import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

from prorl_site.api.exceptions import Problem

# Only these spellings can give a NUL, half a surrogate pair or a number that is not finite.
_SUSPECT = re.compile(rb"\\u0000|\\u[dD][89a-fA-F]|\d[eE]\+?\d{3}|\d{309}")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class BoundedJSONParser(JSONParser):
    """Parse JSON; refuse what is nested too deep and what PostgreSQL cannot hold."""

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the parsed body. Raises ParseError, or a Problem that names the place."""
        raw = stream.read()
        try:
            body = super().parse(BytesIO(raw), media_type, parser_context)
            faults = list(_faults(body, "the body")) if _SUSPECT.search(raw) else []
        except RecursionError:
            raise ParseError("it is nested too deep.") from None
        if faults:
            raise Problem(400, "request.malformed", f"{faults[0]}.")
        return body


def _faults(value: Any, place: str) -> Iterator[str]:
    """Yield a sentence for each value that `jsonb` or JSON cannot hold."""
    match value:
        case str() if _UNSTORABLE.search(value):
            yield f"Text with a NUL or half a surrogate pair cannot be stored: {place}"
        case float() if not math.isfinite(value):
            yield f"The number is not finite: {place}"
        case list():
            for index, each in enumerate(value):
                yield from _faults(each, f"{place}[{index}]")
        case dict():
            for name, each in value.items():
                yield from _faults(name, f"a name in {place}")
                yield from _faults(each, f"{place}.{_UNSTORABLE.sub('?', name)}")
