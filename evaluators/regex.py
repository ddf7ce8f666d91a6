"""Find the answer in free text with a regular expression."""

from __future__ import annotations

import re

from evaluators.answers import NORMALISATION, REWARDS, Normalisation, choose, verdict
from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, Score
from evaluators.settings import read_answers, read_choice, read_number, refuse_unknown

FLAGS = {
    "IGNORECASE": re.IGNORECASE,
    "MULTILINE": re.MULTILINE,
    "DOTALL": re.DOTALL,
    "ASCII": re.ASCII,
}
KNOWN = {"source", "pattern", "flags", "take", "group", "mode", *NORMALISATION, *REWARDS}


class RegexEvaluator(Evaluator):
    """Pay when a pattern is found and, if the payload has an `answer`, when it captured that.

    The payload's `pattern` wins over the setting's. `take` chooses among several matches
    (`first`, `last`), `group` what of the match is compared (number or name, default 1 when
    the pattern has a group, else the whole match), `mode` is `search` or `fullmatch`.
    """

    name = "regex"
    description = "A regular expression finds the answer in the text."
    needs_sandbox = False

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, the pattern, its group and the other settings."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        Normalisation.from_settings(settings)
        choose(settings, Artefacts())
        for name in REWARDS:
            read_number(settings, name, 0.0)
        _group(settings, _pattern(settings, payload))
        read_choice(settings, "take", "first", ("first", "last"))
        read_choice(settings, "mode", "search", ("search", "fullmatch"))
        if "answer" in payload:
            read_answers(payload, evaluator=self.name)

    def reference_answer(self, settings: JsonMap, payload: JsonMap) -> str | None:
        """Return the first accepted answer, unless the pattern wants something around it."""
        if "answer" not in payload or _pattern(settings, payload).groups:
            return None
        return read_answers(payload, evaluator=self.name)[0]

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Search; text without a match is wrong, which is a score and not a fault."""
        pattern = _pattern(settings, payload)
        group = _group(settings, pattern)
        text = choose(settings, artefacts)
        if text is None:
            return verdict(settings, False, {"given": None}, "the agent left no answer")
        match = _match(settings, pattern, text)
        if match is None:
            return verdict(settings, False, {"given": None}, "the pattern was not found")
        given = match.group(group) or ""
        rule = Normalisation.from_settings(settings)
        correct = "answer" not in payload or any(
            rule.equal(given, answer) for answer in read_answers(payload, evaluator=self.name)
        )
        return verdict(settings, correct, {"given": given[:1000]}, f"found {given[:1000]!r}")


def _match(settings: JsonMap, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    if read_choice(settings, "mode", "search", ("search", "fullmatch")) == "fullmatch":
        return pattern.fullmatch(text)
    matches = pattern.finditer(text)
    if read_choice(settings, "take", "first", ("first", "last")) == "first":
        return next(matches, None)
    found = None
    for match in matches:
        found = match
    return found


def _pattern(settings: JsonMap, payload: JsonMap) -> re.Pattern[str]:
    source = payload.get("pattern", settings.get("pattern"))
    if not isinstance(source, str) or not source:
        raise InvalidSettings("regex: neither the payload nor the settings have a 'pattern' text")
    names = settings.get("flags", [])
    if not isinstance(names, list) or not all(name in FLAGS for name in map(str, names)):
        raise InvalidSettings(f"setting 'flags' is {names!r}; a list out of {', '.join(FLAGS)}")
    flags = re.RegexFlag(0)
    for name in names:
        flags |= FLAGS[name]
    try:
        return re.compile(source, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidSettings(f"regex: the pattern {source[:200]!r} is wrong: {error}") from error


def _group(settings: JsonMap, pattern: re.Pattern[str]) -> int | str:
    group = settings.get("group", 1 if pattern.groups else 0)
    known = (
        group in pattern.groupindex
        if isinstance(group, str)
        else (type(group) is int and 0 <= group <= pattern.groups)
    )
    if not known or not isinstance(group, int | str):
        raise InvalidSettings(f"setting 'group' is {group!r}; the pattern has no such group")
    return group
