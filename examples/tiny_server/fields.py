"""Read the fields of a request's body; HttpError 400 for what is wrong, naming the field."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.tiny_server.json_http import HttpError

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Say what a request may ask for; lengths in tokens."""

    model: str
    vocabulary: int
    context_length: int


def refuse(name: str, message: str) -> HttpError:
    """Return the error for a field."""
    return HttpError(400, message, param=name)


def check_model(body: dict[str, Any], limits: Limits) -> None:
    """Raise HttpError 404 when the body asks for another model."""
    model = body.get("model")
    if model is not None and model != limits.model:
        raise HttpError(
            404, f"the model {model!r} does not exist here; {limits.model!r} does", param="model"
        )


def prompt_ids(
    value: Any, name: str, limits: Limits, encode: Callable[[str], list[int]]
) -> list[int]:
    """Return a prompt's token ids, given as ids, as a list of one such list, or as a text."""
    if isinstance(value, str):
        value = encode(value)
    elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    ids = token_ids(value, name, limits)
    if not ids:
        raise refuse(name, "the prompt is empty")
    if len(ids) >= limits.context_length:
        raise refuse(
            name,
            f"This model's maximum context length is {limits.context_length} tokens: "
            f"the prompt has {len(ids)} and leaves no room",
        )
    return ids


def token_ids(value: Any, name: str, limits: Limits) -> list[int]:
    """Return a list of token ids, each within the vocabulary."""
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise refuse(name, f"{name} must be one list of token ids")
    outside = [token for token in value if not 0 <= token < limits.vocabulary]
    if outside:
        raise refuse(name, f"{name} holds {outside[0]}; ids go from 0 to {limits.vocabulary - 1}")
    return value


def answer_room(
    body: dict[str, Any], name: str, default: int | None, limits: Limits, prompt: list[int]
) -> int:
    """Return how many tokens may be sampled: all that fit when neither body nor default says."""
    room = limits.context_length - len(prompt)
    asked = integer(body, name, room if default is None else default, 1, None)
    assert asked is not None
    if asked > room:
        raise refuse(
            name,
            f"This model's maximum context length is {limits.context_length} tokens: "
            f"{len(prompt)} in the prompt and {name} {asked} are more",
        )
    return asked


def integer(
    body: dict[str, Any], name: str, default: int | None, low: int, high: int | None
) -> int | None:
    """Return an integer from `low` to `high`."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise refuse(name, f"{name} must be an integer, {limit}")
    return value


def number(
    body: dict[str, Any], name: str, default: float, low: float, high: float, *, above: bool = False
) -> float:
    """Return a number from `low` (or above it) to `high`."""
    value = body.get(name)
    if value is None:
        return default
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not low <= value <= high or (above and value <= low):
        edge = "above" if above else "from"
        raise refuse(name, f"{name} must be a number {edge} {low:g} to {high:g}")
    return float(value)


def flag(body: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """Return true or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(name, f"{name} must be true or false")
    return value


def text(body: dict[str, Any], name: str, default: str = "") -> str:
    """Return a short text, such as a name or a version."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        raise refuse(name, f"{name} must be a text of at most {MAX_NAME_CHARACTERS} characters")
    return value


def mapping(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object; an empty one when it is left out."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(name, f"{name} must be an object")
    return value
