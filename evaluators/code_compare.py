"""Decide whether an output, or a function's value, is the expected one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

COMPARISONS = ("lines", "tokens", "exact")
MOST_DIGITS = 1_000


def same_output(expected: str, output: str, *, comparison: str, tolerance: float) -> bool:
    """Compare printed text.

    `lines`: white space at the ends of lines and of the whole does not count; `tokens`: only the
    words count; `exact`: every character does. But for `exact`, numbers in lines that differ are
    compared as numbers, with `tolerance` absolute or relative where one of both is no integer.
    """
    if comparison == "exact":
        return expected == output
    if comparison == "tokens":
        return _same_words(expected.split(), output.split(), tolerance)
    wanted, found = _lines(expected), _lines(output)
    return len(wanted) == len(found) and all(
        left == right or _same_words(left.split(), right.split(), tolerance, numbers_only=True)
        for left, right in zip(wanted, found, strict=True)
    )


def same_value(expected: object, value: object, *, tolerance: float) -> bool:
    """Compare a function's value with one read from JSON; a tuple is as good as a list."""
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return len(expected) == len(value) and all(
            same_value(left, right, tolerance=tolerance)
            for left, right in zip(expected, value, strict=True)
        )
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        named = {_key(key): each for key, each in value.items()}
        return len(expected) == len(named) and all(
            _key(key) in named and same_value(each, named[_key(key)], tolerance=tolerance)
            for key, each in expected.items()
        )
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        if expected == value:
            return True
        is_float = isinstance(expected, float) or isinstance(value, float)
        return is_float and _close(expected, value, tolerance)
    return type(expected) is type(value) and expected == value


def _key(key: object) -> str:
    """Return a key as JSON writes it, where all keys are text."""
    if key is None or isinstance(key, bool):
        return "null" if key is None else str(key).lower()
    return str(key)


def _close(left: float, right: float, tolerance: float) -> bool:
    try:
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().replace("\r\n", "\n").split("\n")]


def _same_words(
    left: list[str], right: list[str], tolerance: float, *, numbers_only: bool = False
) -> bool:
    return len(left) == len(right) and all(
        _same_number(one, other, tolerance) or (not numbers_only and one == other)
        for one, other in zip(left, right, strict=True)
    )


def _same_number(expected: str, found: str, tolerance: float) -> bool:
    left, right = _number(expected), _number(found)
    if left is None or right is None:
        return False
    if left == right:
        return True
    if not tolerance or not {".", "e"} & set((expected + found).lower()):
        return False
    difference = abs(left - right)
    return difference <= Decimal(tolerance) * max(abs(left), Decimal(1))


def _number(word: str) -> Decimal | None:
    if len(word) > MOST_DIGITS or "_" in word:
        return None
    try:
        number = Decimal(word)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < MOST_DIGITS else None
