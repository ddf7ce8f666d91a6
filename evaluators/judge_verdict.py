"""Say who judges, read the votes and put them together, or abstain."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluators.base import InvalidSettings, JsonMap
from evaluators.final_answer import THINKING_ENDS
from evaluators.settings import finite, read_choice, read_number

KINDS = ("score", "yes_no", "json")
AGGREGATES = ("mean", "median", "majority", "min")
_BRACKETS = re.compile(r"\[\[\s*([^\[\]]{1,40}?)\s*\]\]")
_NUMBER = re.compile(r"[-+]?\d{1,12}(?:\.\d{1,12})?")
_WORD = re.compile(r"^\W*(?:verdict|answer|judgement|judgment)?\W*(yes|no)\W*$", re.IGNORECASE)
_OBJECT = re.compile(r"\{[^{}]*\}")
MAX_TEXT = 200_000


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A server, its model and how it is sampled; `url` is what stands before /chat/completions."""

    url: str
    model: str
    api_key: str
    temperature: float
    top_p: float
    max_tokens: int
    request_seconds: float
    retries: int

    def body(self, messages: Sequence[dict[str, str]], seed: int) -> dict[str, Any]:
        """Return the request for one vote."""
        return {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": seed,
        }


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What the judge said once; tokens are None where the server does not count."""

    text: str
    seed: int
    finish_reason: str
    tokens_in: int | None
    tokens_out: int | None
    cached: bool = False
    requests: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the votes say: `score` from 0 to 1, None when they abstain, and why."""

    score: float | None
    agreement: float
    reason: str = ""


def read_scale(settings: JsonMap) -> tuple[float, float]:
    """Return the lowest and the highest score of a vote."""
    scale = settings.get("scale", [0, 1])
    if not isinstance(scale, list) or len(scale) != 2:
        raise InvalidSettings(f"setting 'scale' is {str(scale)[:50]!r}; it must be [low, high]")
    low, high = (finite(bound, "setting 'scale'") for bound in scale)
    if low >= high:
        raise InvalidSettings(f"setting 'scale' is {scale!r}; low must be below high")
    return low, high


def read_vote(kind: str, text: str, scale: tuple[float, float]) -> float | None:
    """Return a vote from 0 to 1; None when the text holds no verdict of this kind in range.

    The last verdict counts: a judge may quote what the answer claims before it gives its own.
    """
    text = text[-MAX_TEXT:]
    for ending in THINKING_ENDS:
        text = text.rpartition(ending)[2]
    if kind == "yes_no":
        return _yes_no(text)
    found = _json_score(text) if kind == "json" else _bracketed(text)
    if found is None:
        return None
    low, high = scale
    return (found - low) / (high - low) if low <= found <= high else None


def _bracketed(text: str) -> float | None:
    marks = _BRACKETS.findall(text)
    return _as_number(marks[-1]) if marks else None


def _as_number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _yes_no(text: str) -> float | None:
    marks = _BRACKETS.findall(text)
    word = marks[-1].lower() if marks else ""
    if not marks:
        lines = text.strip().splitlines()
        last = _WORD.match(lines[-1][:100]) if lines else None
        word = last[1].lower() if last else ""
    return {"yes": 1.0, "no": 0.0}.get(word)


def _json_score(text: str) -> float | None:
    found = _OBJECT.findall(text)
    if not found:
        return None
    try:
        value = json.loads(found[-1])["score"]
    except (ValueError, KeyError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def put_together(settings: JsonMap, votes: Sequence[float | None]) -> Outcome:
    """Return what the votes say by the setting `aggregate`.

    `agreement` is the share of all votes that stand behind the result: of a majority those that
    gave it, else those that could be read. Less than the setting `agreement` is an abstention, and
    so is a tie of a majority.
    """
    read = [vote for vote in votes if vote is not None]
    how = read_choice(settings, "aggregate", "mean", AGGREGATES)
    wanted = read_agreement(settings)
    if not read:
        return Outcome(score=None, agreement=0.0, reason="no vote could be read")
    if how == "majority":
        ranked = Counter(read).most_common(2)
        score, count = ranked[0]
        if len(ranked) > 1 and ranked[1][1] == count:
            return Outcome(
                score=None, agreement=count / len(votes), reason="the votes are divided equally"
            )
    else:
        count = len(read)
        score = _combined(how, read)
    agreement = count / len(votes)
    if agreement < wanted:
        return Outcome(
            score=None,
            agreement=agreement,
            reason=f"{count} of {len(votes)} votes stand behind a result, less than {wanted:g}",
        )
    return Outcome(score=score, agreement=agreement)


def _combined(how: str, read: Sequence[float]) -> float:
    if how == "min":
        return min(read)
    return statistics.fmean(read) if how == "mean" else statistics.median(read)


def read_agreement(settings: JsonMap) -> float:
    """Return the share of votes that must stand behind a result."""
    wanted = read_number(settings, "agreement", 0.5)
    if not 0 <= wanted <= 1:
        raise InvalidSettings(f"setting 'agreement' is {wanted:g}; it must be 0 to 1")
    return wanted
