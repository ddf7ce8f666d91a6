"""Decide which names, ids and arguments of calls a rollout can carry on.

They are written to PostgreSQL, sent on as JSON and tokenised again: what one of these refuses is
the policy's mistake, told to it in words that it can act on.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from rollouts.text import clean_text

MAX_DEPTH = 64
MAX_NAME_CHARACTERS = 200
MAX_ID_CHARACTERS = 128

NOT_AN_OBJECT = "The arguments of {name} are no JSON object. Write them as {{...}}."
NOT_JSON = "The arguments of {name} are not JSON ({error}). Write them again."
NOT_USABLE = "The arguments of {name} hold {what}. Write them again without it."


def clean_name(name: str) -> str:
    """Return a tool's name without what is no text, and bounded in length."""
    return clean_text(name)[:MAX_NAME_CHARACTERS]


def usable_id(call_id: str) -> str:
    """Return a call's id as the model gave it, empty where nobody could answer to it."""
    whole = len(call_id) <= MAX_ID_CHARACTERS and clean_text(call_id) == call_id
    return call_id if whole else ""


def read_arguments(given: Any, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return the arguments as an object, or None and a complaint. Takes JSON text as well."""
    if isinstance(given, str):  # as the API's clients see it
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            return None, NOT_JSON.format(name=name, error=error)
    if not isinstance(given, Mapping):
        return None, NOT_AN_OBJECT.format(name=name)
    what = _unusable(given, 0)
    if what:
        return None, NOT_USABLE.format(name=name, what=what)
    return dict(given), ""


def _unusable(value: Any, depth: int) -> str:
    """Say what in a value is no JSON that everybody reads, empty for none."""
    if depth > MAX_DEPTH:
        return f"values nested more than {MAX_DEPTH} deep"
    if isinstance(value, str):
        return _unusable_text(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return "a name that is no string"
        parts: list[Any] = [*value, *value.values()]
        return next((what for part in parts if (what := _unusable(part, depth + 1))), "")
    if isinstance(value, list):
        return next((what for part in value if (what := _unusable(part, depth + 1))), "")
    if isinstance(value, float):
        return "" if math.isfinite(value) else "a number that is not finite"
    if value is None or isinstance(value, bool | int):
        return ""
    return f"a {type(value).__name__}, which JSON does not have"


def _unusable_text(text: str) -> str:
    if "\0" in text:
        return "a NUL character"
    return "" if clean_text(text) == text else "half of a surrogate pair"
