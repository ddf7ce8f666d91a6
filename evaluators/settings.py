"""Read evaluator settings and payloads: one typed reader, one kind of complaint."""

from __future__ import annotations

import math
from collections.abc import Collection

from evaluators.base import InvalidSettings, JsonMap


def refuse_unknown(settings: JsonMap, known: Collection[str], *, evaluator: str) -> None:
    """Raise `InvalidSettings` when a setting has a name that the evaluator does not know."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise InvalidSettings(
            f"{evaluator}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )


def read_flag(settings: JsonMap, name: str, default: bool) -> bool:
    """Return a true/false setting."""
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise InvalidSettings(f"setting {name!r} is {value!r}; it must be true or false")
    return value


def read_number(settings: JsonMap, name: str, default: float) -> float:
    """Return a finite numeric setting."""
    return finite(settings.get(name, default), f"setting {name!r}")


def read_count(settings: JsonMap, name: str, default: int, *, least: int, most: int) -> int:
    """Return a whole number within bounds."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidSettings(
            f"setting {name!r} is {str(value)[:50]}; it must be a whole number from {least} to "
            f"{most}"
        )
    return value


def read_text(settings: JsonMap, name: str, default: str, *, most: int = 100_000) -> str:
    """Return a setting that is text of at most so many characters."""
    value = settings.get(name, default)
    if not isinstance(value, str) or len(value) > most:
        raise InvalidSettings(
            f"setting {name!r} is {str(value)[:50]!r}; it must be text of at most {most} characters"
        )
    return value


def read_choice(settings: JsonMap, name: str, default: str, choices: Collection[str]) -> str:
    """Return a setting that is one of a few words."""
    value = settings.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise InvalidSettings(
            f"setting {name!r} is {value!r}; it must be one of {', '.join(sorted(choices))}"
        )
    return value


def read_answers(payload: JsonMap, *, evaluator: str) -> tuple[str, ...]:
    """Return the accepted answers: `answer` is a string, a number or a list of them."""
    if "answer" not in payload:
        raise InvalidSettings(f"{evaluator}: the payload has no 'answer'")
    value = payload["answer"]
    answers = value if isinstance(value, list) else [value]
    if not answers:
        raise InvalidSettings(f"{evaluator}: the payload's 'answer' is an empty list")
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise InvalidSettings(
                f"{evaluator}: the payload's 'answer' is {answer!r}; it must be a string, a number "
                "or a list of them"
            )
    return tuple(str(answer) for answer in answers)


def finite(value: object, what: str) -> float:
    """Return a finite number; booleans and text are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSettings(f"{what} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise InvalidSettings(f"{what} is too large") from error
    if not math.isfinite(number):
        raise InvalidSettings(f"{what} is {value!r}; it must be a finite number")
    return number
