r"""Score multiple choice: which letter does the text state?

Explicit statements come first: `\boxed{C}`, a match of `pattern`, `Answer: C`, `the answer is (C)`,
`option C`. Only where there is none, marks count: `**C**`, `(C)`, `C. text` or `C` on a line of
its own. Of several the last wins; a statement that names two letters is a hedge and wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluators.answers import REWARDS, Normalisation, choose
from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, Score
from evaluators.final_answer import MAX_STATEMENTS, answer_lines, boxes, last_part, read_tail
from evaluators.settings import (
    read_answers,
    read_choice,
    read_flag,
    read_number,
    read_text,
    refuse_unknown,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DEFAULT_LETTERS = "ABCDEFGHIJ"
FORMATS = ("any", "boxed", "answer_line", "pattern")
SEVERAL = ("any", "all")
KNOWN = {
    "source",
    "format",
    "letters",
    "pattern",
    "several",
    "tail_characters",
    "skip_thinking",
    "unanswered_reward",
    *REWARDS,
}
_OPTION = re.compile(r"\b(?:option|choice)\s+[(\[*]{0,3}([A-Za-z])\b(?![\u2019'])", re.IGNORECASE)
_MARKED = re.compile(
    r"\*\*\(?([A-Z])\)?[.):]?\*\*"  # **C** and **(C)**
    r"|(?<![\w(])\(([A-Z])\)(?![\w(])"  # (C)
    r"|^[ \t>*-]*\(?([A-Z])[.):](?=\s|$)"  # C. text, at a line's start
    r"|^[ \t>*-]*([A-Z])[ \t*.]*$",  # C on a line of its own
    re.MULTILINE,
)
_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|bf|rm|boldsymbol)\b\s*")
_ALONE = re.compile(r"(?:(?:option|choice|answer)\s+)?([A-Za-z])[.):]?", re.IGNORECASE)
_LIST = re.compile(r"[A-Za-z](?:(?:[\s,;&/+]|\band\b|\bor\b)+[A-Za-z])+[.]?", re.IGNORECASE)
_LEADING = re.compile(r"(?:(?:option|choice)\s+)?([A-Z])(?:[.):,;]|\s|$)", re.IGNORECASE)
_HEDGE = re.compile(r"\bor\b\W{0,3}(?:maybe|perhaps|possibly|option|choice)?\W{0,3}\b([A-Z])\b")
_TEXT = Normalisation(casefold=True, collapse_whitespace=True, strip_punctuation=True)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The letters that may be named, and the texts behind them where they are known."""

    letters: str
    texts: Mapping[str, str]

    def of_text(self, statement: str) -> str | None:
        """Return the letter of the only option with this text."""
        wanted = _TEXT.apply(statement)
        same = [letter for letter, text in self.texts.items() if _TEXT.apply(text) == wanted]
        return same[0] if len(same) == 1 and wanted else None


@dataclass(frozen=True, kw_only=True)
class _Stated:
    letters: frozenset[str]
    text: str
    how: str
    hedged: bool = False


class ChoiceEvaluator(Evaluator):
    r"""Pay when the stated letter is the right one.

    The payload's `answer` is a letter, an option's text, or a list of them; `options` are the
    texts as the agent saw them: a list, an object of letters, or a list of objects with one letter
    each. Settings: `source`; `format` `any`, `boxed`, `answer_line` or `pattern` (its last match,
    group 1; the payload's `pattern` wins); `letters` that may be named, by default those of the
    options, else A to J; `several`: of several right answers `any` suffices, or exactly `all`
    must be stated; `tail_characters`, `skip_thinking`, `unanswered_reward` as in `math`.
    """

    name = "choice"
    description = "The stated letter of a multiple choice is the right one."
    needs_sandbox = False

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, options, letters and the expected answer."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        choose(settings, Artefacts())
        for name in (*REWARDS, "unanswered_reward"):
            read_number(settings, name, 0.0)
        read_tail(settings)
        read_flag(settings, "skip_thinking", True)
        read_choice(settings, "several", "any", SEVERAL)
        wanted = read_choice(settings, "format", "any", FORMATS)
        if _pattern(settings, payload) is None and wanted == "pattern":
            raise InvalidSettings("choice: format 'pattern' needs a 'pattern' with one group")
        options = _options(settings, payload)
        for answer in read_answers(payload, evaluator=self.name):
            _right(options, answer)

    def reference_answer(self, settings: JsonMap, payload: JsonMap) -> str | None:
        """Return the right letter, or all of them; None where a pattern wants more around it."""
        if read_choice(settings, "format", "any", FORMATS) == "pattern":
            return None
        options = _options(settings, payload)
        right = [_right(options, each) for each in read_answers(payload, evaluator=self.name)]
        if read_choice(settings, "several", "any", SEVERAL) == "any":
            right = right[:1]
        return f"Answer: \\boxed{{{', '.join(dict.fromkeys(right))}}}"

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Compare; nothing stated, and a hedge, are wrong: a score and no fault."""
        options = _options(settings, payload)
        right = {_right(options, each) for each in read_answers(payload, evaluator=self.name)}
        text = last_part(
            choose(settings, artefacts) or "",
            tail_characters=read_tail(settings),
            skip_thinking=read_flag(settings, "skip_thinking", True),
        )
        stated = _stated(settings, payload, options, text)
        if stated is None:
            correct = False
        elif read_choice(settings, "several", "any", SEVERAL) == "all":
            correct = stated.letters == right and not stated.hedged
        else:
            correct = len(stated.letters) == 1 and stated.letters <= right and not stated.hedged
        return _score(settings, stated, correct)


def _score(settings: JsonMap, stated: _Stated | None, correct: bool) -> Score:
    incorrect = read_number(settings, "incorrect_reward", 0.0)
    if correct:
        reward = read_number(settings, "correct_reward", 1.0)
    elif stated is None:
        reward = read_number(settings, "unanswered_reward", incorrect)
    else:
        reward = incorrect
    format_ok = stated is not None and stated.how != "mark" and not stated.hedged
    return Score(
        reward=reward,
        rewards={
            "reward": reward,
            "accuracy": float(correct),
            "format": float(format_ok),
            "answered": float(stated is not None),
        },
        details={
            "letters": [] if stated is None else sorted(stated.letters),
            "extracted": None if stated is None else stated.text[:1000],
            "how": None if stated is None else stated.how,
            "hedged": stated is not None and stated.hedged,
            "format_ok": format_ok,
            "correct": correct,
        },
        log="no letter was stated" if stated is None else f"stated {stated.text[:1000]!r}",
    )


def _stated(settings: JsonMap, payload: JsonMap, options: _Options, text: str) -> _Stated | None:
    wanted = read_choice(settings, "format", "any", FORMATS)
    explicit: list[tuple[int, int, str, str]] = []  # where it ends, rank, how, text
    if wanted in ("any", "boxed"):
        explicit += [(each.end, 1, each.how, each.text) for each in boxes(text)]
    pattern = _pattern(settings, payload)
    if pattern is not None and wanted in ("any", "pattern"):
        explicit += [
            (match.end(), 1, "pattern", match[1])
            for match in list(pattern.finditer(text))[-MAX_STATEMENTS:]
            if match[1]
        ]
    if wanted in ("any", "answer_line"):
        explicit += [(each.end, 0, each.how, each.text) for each in answer_lines(text)]
    if wanted == "any":
        explicit += [
            (match.end(), 0, "option", match[1])
            for match in list(_OPTION.finditer(text))[-MAX_STATEMENTS:]
        ]
    for _end, _rank, how, statement in sorted(explicit, reverse=True):
        read = _read(options, statement, how)
        if read is not None:
            return read
    return _marked(options, text) if wanted == "any" else None


def _read(options: _Options, statement: str, how: str) -> _Stated | None:
    """Return the letters that one statement names; None where it names none."""
    boxed = boxes(statement)
    plain = _COMMAND.sub("", boxed[-1].text if boxed else statement).strip()
    plain = plain.strip("*_$`'\"{}()[]<>\u201c\u201d. \t\\").strip()
    letters: list[str] = []
    by_text = options.of_text(plain)
    alone = _ALONE.fullmatch(plain)
    if alone and alone[1].upper() in options.letters:
        return _Stated(letters=frozenset(alone[1].upper()), text=statement, how=how)
    if by_text is not None:
        return _Stated(letters=frozenset(by_text), text=statement, how=how)
    if _LIST.fullmatch(plain):
        letters = re.findall(r"\b[A-Za-z]\b", plain)
    elif 1 < len(plain) <= len(options.letters) and plain.isupper() and plain.isalpha():
        letters = list(plain)  # ACD
    if letters and all(letter.upper() in options.letters for letter in letters):
        hedged = re.search(r"\bor\b", plain, re.IGNORECASE) is not None
        named = frozenset(letter.upper() for letter in letters)
        return _Stated(letters=named, text=statement, how=how, hedged=hedged and len(named) > 1)
    leading = _LEADING.match(plain)
    # A whole text that begins with "I" or "A" is mostly a sentence.
    is_word = how == "whole" and plain[leading.end(1) :][:1].isspace() if leading else False
    if leading and leading[1] in options.letters and not is_word:
        other = _HEDGE.search(plain, leading.end(1))
        hedged = other is not None and other[1] in options.letters and other[1] != leading[1]
        return _Stated(letters=frozenset(leading[1]), text=statement, how=how, hedged=hedged)
    inner = re.fullmatch(r".*?[(\[]([A-Z])[)\]].{0,3}", plain) if len(plain) < 500 else None
    if inner and inner[1] in options.letters:
        return _Stated(letters=frozenset(inner[1]), text=statement, how=how)
    return None


def _marked(options: _Options, text: str) -> _Stated | None:
    """Return the last mark, or the whole text where it is a letter or an option's text."""
    whole = (
        _read(options, text, "whole") if len(text) <= 2_000 and "\n" not in text.strip() else None
    )
    if whole is not None:
        return whole
    marks = list(_MARKED.finditer(text))[-MAX_STATEMENTS:]
    for match in reversed(marks):
        letter = next(group for group in match.groups() if group)
        if letter in options.letters:
            line = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0]
            other = _HEDGE.search(line[:2000])
            hedged = other is not None and other[1] in options.letters and other[1] != letter
            return _Stated(
                letters=frozenset(letter), text=match[0].strip(), how="mark", hedged=hedged
            )
    return None


def _pattern(settings: JsonMap, payload: JsonMap) -> re.Pattern[str] | None:
    source = payload.get("pattern", settings.get("pattern"))
    if source is None:
        return None
    if not isinstance(source, str) or not source:
        raise InvalidSettings("choice: 'pattern' must be the text of a regular expression")
    try:
        pattern = re.compile(source)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidSettings(f"choice: the pattern {source[:200]!r} is wrong: {error}") from error
    if not pattern.groups:
        raise InvalidSettings(
            f"choice: the pattern {source[:200]!r} has no group; put what the letter is in ( )"
        )
    return pattern


def _options(settings: JsonMap, payload: JsonMap) -> _Options:
    texts = _option_texts(payload.get("options"))
    letters = "".join(texts) or DEFAULT_LETTERS
    if "letters" in settings:
        letters = read_text(settings, "letters", letters, most=len(LETTERS))
    if not letters or set(letters) - set(LETTERS) or len(set(letters)) != len(letters):
        raise InvalidSettings(f"setting 'letters' is {letters!r}; write capital letters like ABCD")
    return _Options(letters=letters, texts=texts)


def _option_texts(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        value = {str(letter): text for each in value for letter, text in each.items()}
    elif isinstance(value, list) and len(value) <= len(LETTERS):
        value = dict(zip(LETTERS, value, strict=False))
    if not isinstance(value, Mapping) or not value:
        raise InvalidSettings(
            "choice: the payload's 'options' must be a list of at most 26 texts or an object of "
            "letters and texts"
        )
    texts = {}
    for name, text in value.items():
        letter = str(name).strip().strip("().").upper()
        if len(letter) != 1 or letter not in LETTERS or not isinstance(text, str | int | float):
            raise InvalidSettings(
                f"choice: the payload's 'options' have {str(name)[:20]!r}; each is one letter and "
                "its text"
            )
        texts[letter] = str(text)
    return texts


def _right(options: _Options, answer: str) -> str:
    letter = answer.strip().strip("().").upper()
    if len(letter) == 1 and letter in options.letters:
        return letter
    by_text = options.of_text(answer)
    if by_text is None:
        raise InvalidSettings(
            f"choice: the payload's 'answer' {answer[:100]!r} is neither one of the letters "
            f"{options.letters} nor the text of one option"
        )
    return by_text
