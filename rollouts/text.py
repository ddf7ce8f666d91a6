"""Text from sandboxes and servers, made fit for PostgreSQL: no NUL, no lone surrogates."""

from typing import Any

REPLACEMENT = "\ufffd"


def clean_text(text: str) -> str:
    """Return the text with NUL and what is no Unicode text replaced."""
    text = text.replace("\0", REPLACEMENT)
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def clean_json(value: Any) -> Any:
    """Return a JSON value with every string in it cleaned, names of members included."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(name)): clean_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(entry) for entry in value]
    return value
