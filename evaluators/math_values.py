r"""Compare two mathematical statements by value: numbers here, all else with math-verify.

math-verify's traps, and what is done about them:
- its time limits use `signal.alarm`, which would take the place of the evaluator process's own
  alarm: they are switched off, the caller limits processor time;
- `parse` of a whole answer takes any expression in it: only the stated answer is given to it;
- `verify` is true when any of several readings is equal, so that "5 or 6" equals 6: alternatives
  are told apart here, and all of them must be right;
- `verify(gold, answer)` is not symmetric: the expected answer always comes first;
- both sides are rounded to the same places, so that 0 equals 1e-9: small numbers are compared
  relatively here.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

MAX_NUMBER_CHARACTERS = 100
MAX_PARTS = 20
MAX_NESTING = 60
_PLAIN = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d{1,4})?", re.IGNORECASE)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}|\\,|\\!|,\\!)\d{3})+(?:\.\d+)?")
_SEPARATORS = re.compile(r"\{,\}|\\[,!]|,")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}")
_COMMANDS = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|operatorname|begin|end)\{[^{}]*\}|\\[A-Za-z]+")
_FORMULA_COMMAND = re.compile(r"\\[A-Za-z]")
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,}(?![A-Za-z])")
_NO_PROSE = {
    "and",
    "or",
    "pi",
    "sin",
    "cos",
    "tan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "mod",
    "max",
    "min",
}
_FORMULA = r"(?:\$[^$\n]+\$|\\\([^\n]+?\\\))"
_LEADING = re.compile(rf"{_FORMULA}(?:\s*(?:,|;|,?\s*and|,?\s*or)\s*{_FORMULA})*")
_CLAUSE_ENDS = re.compile(r"[,;.]\s|\s(?:because|since|as|where|so|but|for)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"(?<![\w^.])\d+(?:[.,/]\d+)*")
_HEDGES = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|between|either|alternatively)\b", re.IGNORECASE
)
_SEVERAL = re.compile(r",|;|\band\b|\bor\b|\bbetween\b")
_DENIALS = re.compile(
    r"\bnot\b|\bneither\b|n't\b|\\(?:neq?|lnot|neg)\b|\u2260"
    r"|^[\s$]*(?:\\(?:[gl]eq?(?:slant)?|gt|lt)\b|[<>\u2264\u2265])",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")
_OR = re.compile(
    r"(?:\s|~|\\[ ,;])*"
    r"(?:\\(?:text|textrm|mathrm|mbox)\{\s*or\s*\}|\\(?:lor|vee)\b|\bor\b)\s*"
)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How close two numbers must be that are not whole: so many decimal places."""

    places: int = 6


def tidy(text: str) -> str:
    """Return a statement without what encloses it: dollars, bold marks, a full stop at the end."""
    before = None
    text = text.strip()
    while text != before:
        before = text
        text = text.strip().rstrip(".").rstrip()
        if text.endswith(("**", "__")) and text.count(text[-2:]) == 1:
            text = text[:-2]
        for opening, closing in _WRAPPERS:
            inside = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inside
            ):
                text = inside
    return text


def quick_verdict(gold: str, given: str, rounding: Rounding) -> bool | None:
    """Decide what needs no library: no statement, equal texts, plain numbers; None: ask it."""
    left, right = tidy(gold), tidy(given)
    if not right:
        return None if _number(left) is None else False
    if re.sub(r"\s+", " ", left) == re.sub(r"\s+", " ", right):
        return True
    numbers = _number(left), _number(right)
    if numbers[0] is None or numbers[1] is None:
        return None
    return _equal(numbers[0], numbers[1], rounding)


def _equal(gold: Decimal, given: Decimal, rounding: Rounding) -> bool:
    if gold == given:
        return True
    if gold == gold.to_integral_value() and abs(gold) < Decimal(10) ** 15:
        near = Decimal(10) ** -rounding.places
    else:
        near = min(Decimal(10) ** -rounding.places, abs(gold) * Decimal(10) ** -rounding.places)
    if given == given.to_integral_value() and gold == gold.to_integral_value():
        return False
    return abs(gold - given) <= near


def _number(text: str) -> Decimal | None:
    text = text.replace("\u2212", "-").removeprefix(r"\$").removeprefix("$").strip()
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    if _GROUPED.fullmatch(text):
        text = _SEPARATORS.sub("", text)
    if not _PLAIN.fullmatch(text):
        return None
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


@lru_cache(maxsize=1)
def preload() -> None:
    """Import the library and use it once, about a second, so that forks need not."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we limit its time
    _verified(_parsed(r"\frac{1}{2}"), "x + 1", Rounding(), strict=True)


def steps(gold: str, given: str, rounding: Rounding, *, strict: bool) -> Iterator[Any]:
    """Yield True when the expected answer could be read, then whether the given one equals it.

    What happens between the two is the given answer's doing.
    """
    expected = _parsed(gold)
    if not expected:
        return
    for value in expected:
        if hasattr(value, "evalf"):  # what cannot be evaluated must show before the answer comes
            with contextlib.suppress(Exception):
                value.evalf(3)
    yield True
    if _is_evasive(gold, given):
        yield False
        return
    alternatives = [part for part in _OR.split(given)[:MAX_PARTS] if part.strip()]
    if len(alternatives) > 1 and not _OR.search(gold):
        yield all(_verified(expected, part, rounding, strict=strict) for part in alternatives)
        return
    yield _verified(expected, given, rounding, strict=strict)


def _verified(expected: list[Any], given: str, rounding: Rounding, *, strict: bool) -> bool:
    from math_verify import verify

    parsed = _parsed(given)
    if expected and parsed and _equal_to_sixty_digits(expected[0], parsed[0]):
        return True
    return bool(
        verify(
            expected,
            parsed,
            float_rounding=rounding.places,
            strict=strict,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _equal_to_sixty_digits(gold: Any, given: Any) -> bool:
    """Tell whether two numbers are equal, which symbols may take minutes for: (2+√3)^2016."""
    import sympy

    if isinstance(given, sympy.Eq) and given.lhs.is_Symbol and not isinstance(gold, sympy.Eq):
        given = given.rhs
    for each in (gold, given):
        if not isinstance(each, sympy.Expr) or each.free_symbols or each.is_rational:
            return False
    with contextlib.suppress(Exception):
        left, right = sympy.N(gold, 70), sympy.N(given, 70)
        if not (left.is_Float and right.is_Float and left.is_finite and right.is_finite):
            return False
        return bool(abs(left - right) <= abs(left) * sympy.Float(10) ** -60)
    return False


def _parsed(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    statement = tidy(text).replace("\n", " ")
    words = _TEXT.fullmatch(statement)
    if words:
        statement = words[1]
    formulas = _LEADING.match(statement)
    if formulas:
        statement = formulas[0]
    elif _is_prose(statement):
        statement = _clause(statement)
    is_prose = formulas is not None or _is_prose(statement)
    # The value of a sentence is looked for in it; a formula is taken whole.
    found = parse(
        statement if is_prose and _DIGIT.search(statement) else rf"\boxed{{{statement}}}",
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    return list(found)


def _clause(statement: str) -> str:
    """Return the part of a sentence that states, without its reasons."""
    return _CLAUSE_ENDS.split(statement, maxsplit=1)[0]


def _is_evasive(gold: str, given: str) -> bool:
    """Tell whether a statement denies, or offers several numbers where one is expected."""
    if _DENIALS.search(given) and not _DENIALS.search(gold):
        return True
    statement = tidy(given)
    if _LEADING.match(statement) or not _is_prose(statement) or _SEVERAL.search(gold):
        return False
    told = statement if _HEDGES.search(statement) else _clause(statement).rpartition("=")[2]
    return len(set(_NUMBERS.findall(told))) > 1


def _is_prose(statement: str) -> bool:
    if _FORMULA_COMMAND.search(_TEXT.sub(" ", statement)):
        return False
    words = _WORD.findall(_COMMANDS.sub(" ", statement))
    return "$" in statement or (" " in statement and not _NO_PROSE.issuperset(words))


def nesting(text: str) -> int:
    """Return how deep brackets are nested in a text."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest
