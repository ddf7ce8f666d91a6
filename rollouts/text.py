"""Text from sandboxes and servers, made fit for PostgreSQL: no NUL, no lone surrogates."""

import math
from typing import Any

REPLACEMENT = "\ufffd"
# PostgreSQL reads some thousands, Python's own writer a thousand.
MAX_DEPTH = 128


def clean_text(text: str) -> str:
    """Return the text with NUL and what is no Unicode text replaced."""
    return whole_characters(text.replace("\0", REPLACEMENT))


def whole_characters(text: str) -> str:
    """Return the text with lone surrogates replaced: UTF-8 cannot write them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def clean_json(value: Any) -> Any:
    """Return a JSON value with every string in it cleaned, names of members included.

    Numbers that are not finite become None, and what is nested deeper than `MAX_DEPTH` becomes
    a replacement character: PostgreSQL takes neither.
    """
    return _clean(value, MAX_DEPTH)


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list | tuple):
        return value
    if depth == 0:
        return REPLACEMENT
    if isinstance(value, dict):
        return {clean_text(str(name)): _clean(entry, depth - 1) for name, entry in value.items()}
    if len(value) > 1 and _are_clean_numbers(value):
        return list(value)
    return [_clean(entry, depth - 1) for entry in value]


def _are_clean_numbers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a list holds finite numbers alone, as token ids and log-probabilities do."""
    kinds = set(map(type, values))
    return kinds == {int} or (kinds == {float} and all(map(math.isfinite, values)))
