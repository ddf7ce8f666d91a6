"""Choose the text to judge and bring it into a comparable form."""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from evaluators.base import Artefacts, JsonMap, Score
from evaluators.settings import read_choice, read_flag, read_number

SOURCES = ("answer", "last_message", "answer_or_last_message")
NORMALISATION = (
    *("strip", "casefold", "collapse_whitespace", "strip_punctuation", "articles", "numeric"),
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
REWARDS = ("correct_reward", "incorrect_reward")


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Bring two texts into a form in which equal answers are equal strings."""

    strip: bool = True
    casefold: bool = False
    collapse_whitespace: bool = False
    strip_punctuation: bool = False
    articles: bool = False
    numeric: bool = False

    @classmethod
    def from_settings(cls, settings: JsonMap) -> Normalisation:
        """Read the six flags; raise `InvalidSettings` when one is not true or false."""
        return cls(
            strip=read_flag(settings, "strip", True),
            casefold=read_flag(settings, "casefold", False),
            collapse_whitespace=read_flag(settings, "collapse_whitespace", False),
            strip_punctuation=read_flag(settings, "strip_punctuation", False),
            articles=read_flag(settings, "articles", False),
            numeric=read_flag(settings, "numeric", False),
        )

    def apply(self, text: str) -> str:
        """Return the normal form; applying it twice changes nothing more."""
        if self.casefold:
            text = unicodedata.normalize("NFD", text).casefold()
        text = unicodedata.normalize("NFC", text)
        if self.articles:
            text = _ARTICLES.sub(" ", text)
        if self.collapse_whitespace:
            text = " ".join(text.split())
        before = None
        while text != before:  # each of the two can bare what the other takes off
            before = text
            if self.strip or self.collapse_whitespace:
                text = text.strip()
            if self.strip_punctuation:
                text = text.strip(string.punctuation)
        return text

    def equal(self, left: str, right: str) -> bool:
        """Compare two texts; with `numeric`, numbers of equal value are equal (`7.0` and `7`)."""
        if self.apply(left) == self.apply(right):
            return True
        if not self.numeric:
            return False
        numbers = _number(left), _number(right)
        return None not in numbers and numbers[0] == numbers[1]


def choose(settings: JsonMap, artefacts: Artefacts) -> str | None:
    """Return the text that `source` names; None when the agent left none."""
    source = read_choice(settings, "source", "answer_or_last_message", SOURCES)
    if source == "last_message":
        return artefacts.last_message
    if artefacts.answer is None and source == "answer_or_last_message":
        return artefacts.last_message or None
    return artefacts.answer


def verdict(settings: JsonMap, correct: bool, details: JsonMap, log: str) -> Score:
    """Return the score of a yes/no judgement, worth `correct_reward` or `incorrect_reward`."""
    name, default = ("correct_reward", 1.0) if correct else ("incorrect_reward", 0.0)
    reward = read_number(settings, name, default)
    return Score(
        reward=reward,
        rewards={"reward": reward, "accuracy": float(correct)},
        details={**details, "correct": correct},
        log=log,
    )


def _number(text: str) -> Decimal | None:
    cleaned = text.strip().replace(",", "").replace("\u2212", "-").removeprefix("$").rstrip(".")
    if len(cleaned) > 100:
        return None
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
