r"""Score a mathematical answer by its value, with the library math-verify.

The final statement is found first (`evaluators.final_answer`); only that statement is compared,
so that neither a quoted question nor a list of guesses can win. Plain numbers are compared
exactly, without the library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from evaluators.answers import REWARDS, choose
from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, Score
from evaluators.bounded import tell_within
from evaluators.final_answer import Found, answer_lines, boxes, last_part, read_tail
from evaluators.math_values import (
    MAX_NESTING,
    Rounding,
    nesting,
    preload,
    quick_verdict,
    steps,
    tidy,
)
from evaluators.settings import (
    read_answers,
    read_choice,
    read_count,
    read_flag,
    read_number,
    refuse_unknown,
)

FORMATS = ("any", "boxed", "answer_line", "whole")
MULTIPLE = ("last", "all")
KNOWN = {
    "source",
    "format",
    "multiple",
    "tail_characters",
    "skip_thinking",
    "float_rounding",
    "strict",
    "seconds",
    "unanswered_reward",
    *REWARDS,
}
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{[\s._?\u2026]*\}")
_NOTHING = set(" \t$.*_`\\{}()[]")
MAX_STATEMENT_CHARACTERS = 2_000
LAST_LINE_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    correct: bool
    by: str  # how it was decided
    trouble: str = ""


class MathEvaluator(Evaluator):
    r"""Pay when the final answer equals one of the payload's `answer` in value.

    Settings: `source`; `format`: where the answer stands, `any` (last `\boxed{}`, else last
    `Answer:` line or `####`, else the last line), `boxed`, `answer_line` or `whole` (all of the
    text); `multiple`: of several boxes the `last` counts, or `all` together as a list;
    `tail_characters`: only so much of the end is read; `skip_thinking`: what comes before
    `</think>` is left out; `float_rounding`: decimal places; `strict`: names of variables matter,
    and a list in brackets is no set; `seconds` of processor time for one comparison;
    `unanswered_reward`, by default `incorrect_reward`, where nothing is stated.
    """

    name = "math"
    description = "The final answer equals the expected one in mathematical value."
    needs_sandbox = False

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names and values; the expected answer is parsed when it is needed."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        choose(settings, Artefacts())
        for name in (*REWARDS, "unanswered_reward"):
            read_number(settings, name, 0.0)
        read_choice(settings, "format", "any", FORMATS)
        read_choice(settings, "multiple", "last", MULTIPLE)
        read_tail(settings)
        for name in ("skip_thinking", "strict"):
            read_flag(settings, name, True)
        _rounding(settings)
        _seconds(settings)
        read_answers(payload, evaluator=self.name)

    def reference_answer(self, settings: JsonMap, payload: JsonMap) -> str | None:
        """Return the first accepted answer as the setting `format` wants it."""
        gold = _gold(read_answers(payload, evaluator=self.name)[0])
        wanted = read_choice(settings, "format", "any", FORMATS)
        if wanted == "whole":
            return gold
        return f"Answer: {gold}" if wanted == "answer_line" else rf"\boxed{{{gold}}}"

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Compare; nothing stated, or what cannot be read, is wrong: a score and no fault."""
        found = _stated(settings, choose(settings, artefacts) or "")
        given = "" if found is None else found.text
        verdict = _Verdict(correct=False, by="nothing was stated")
        for expected in read_answers(payload, evaluator=self.name):
            verdict = _compare(settings, _gold(expected), given)
            if verdict.correct:
                break
        format_ok = found is not None and found.how != "last_line"
        return _score(settings, found, verdict, format_ok)


def _score(settings: JsonMap, found: Found | None, verdict: _Verdict, format_ok: bool) -> Score:
    incorrect = read_number(settings, "incorrect_reward", 0.0)
    if verdict.correct:
        reward = read_number(settings, "correct_reward", 1.0)
    elif found is None:
        reward = read_number(settings, "unanswered_reward", incorrect)
    else:
        reward = incorrect
    given = None if found is None else found.text[:1000]
    details = {
        "extracted": given,
        "how": None if found is None else found.how,
        "format_ok": format_ok,
        "correct": verdict.correct,
        "by": verdict.by,
    }
    if verdict.trouble:
        details["trouble"] = verdict.trouble
    return Score(
        reward=reward,
        rewards={
            "reward": reward,
            "accuracy": float(verdict.correct),
            "format": float(format_ok),
            "answered": float(found is not None),
        },
        details=details,
        log="no answer was stated" if found is None else f"stated {given!r} ({found.how})",
    )


def _stated(settings: JsonMap, text: str) -> Found | None:
    """Return the statement that counts; None where the text states nothing in the wanted form."""
    wanted = read_choice(settings, "format", "any", FORMATS)
    text = last_part(
        text,
        tail_characters=read_tail(settings),
        skip_thinking=read_flag(settings, "skip_thinking", True),
    )
    if wanted == "whole":
        return _cut(Found(text=text.strip(), how="whole", end=len(text)))
    if wanted in ("any", "boxed"):
        found = boxes(text)
        if found and read_choice(settings, "multiple", "last", MULTIPLE) == "all":
            together = ", ".join(dict.fromkeys(each.text for each in found))
            return _cut(Found(text=together, how="boxed", end=found[-1].end))
        if found:
            return _cut(found[-1])
    if wanted in ("any", "answer_line"):
        lines = answer_lines(text)
        if lines:
            return _cut(lines[-1])
    if wanted == "any":
        last = text.strip().rpartition("\n")[2].strip()
        return _cut(Found(text=last[-LAST_LINE_CHARACTERS:], how="last_line", end=len(text)))
    return None


def _cut(found: Found) -> Found | None:
    """Return what can be a statement: not empty, and the first part of one that has no end."""
    boxed = boxes(found.text)
    text = (boxed[-1] if boxed else found).text[:MAX_STATEMENT_CHARACTERS].strip()
    said = set(tidy(_EMPTY_BOX.sub("", text))) - _NOTHING
    return Found(text=text, how=found.how, end=found.end) if said else None


def _gold(expected: str) -> str:
    """Return the expected answer out of a worked solution, if it is one."""
    found = boxes(expected) or [each for each in answer_lines(expected) if each.how == "hashes"]
    return found[-1].text if found else expected.strip()


def _compare(settings: JsonMap, gold: str, given: str) -> _Verdict:
    rounding = _rounding(settings)
    quick = quick_verdict(gold, given, rounding)
    if quick is not None:
        return _Verdict(correct=quick, by="numbers or text")
    strict = read_flag(settings, "strict", True)
    if nesting(given) > MAX_NESTING:
        return _Verdict(correct=False, by="nesting", trouble=f"deeper than {MAX_NESTING}")
    preload()
    told = tell_within(_seconds(settings), lambda: steps(gold, given, rounding, strict=strict))
    if not told.values:
        raise InvalidSettings(
            f"math: the expected answer {gold[:200]!r} cannot be read ({told.trouble}); write it "
            "as LaTeX or a number, or raise the setting 'seconds'"
        )
    correct = len(told.values) > 1 and told.values[1] is True
    return _Verdict(correct=correct, by="math-verify", trouble=told.trouble)


def _rounding(settings: JsonMap) -> Rounding:
    return Rounding(places=read_count(settings, "float_rounding", 6, least=0, most=50))


def _seconds(settings: JsonMap) -> float:
    seconds = read_number(settings, "seconds", 5.0)
    if not 0.1 <= seconds <= 600:
        raise InvalidSettings(f"setting 'seconds' is {seconds:g}; it must be 0.1 to 600")
    return seconds
