"""Reward what was done on the way: rules over the turns of the conversation.

A turn is one message of the policy's and the answers of its tools. Each rule gives a turn a
value, which its weight multiplies; the sum is the turn's reward. What a conversation cannot show
(a turn that was cut from its context) has no reward.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, Score
from evaluators.settings import finite, read_choice, read_number, read_text, refuse_unknown

SCALARS = ("mean", "sum", "last", "min")
KNOWN = {"rules", "scalar", "low", "high", "error_pattern", "malformed_pattern"}
MAX_RULES = 50
MAX_TEXT = 200_000
# What this service's own tools and agents say; other tools' words need a pattern of their own.
ERRORS = (
    r"\[exit code: (?!0\])|\[timed out|^(?:error|traceback|exception)\b"
    r"|^There is no tool named |^Not run: |^The call could not be read"
)
MALFORMED = (
    r"^There is no tool named |^Not run: |^The call could not be read|^No command found\."
    r"|^Found \d+ command blocks|^You called no tool\.|^Your answer was cut off"
    r"|^The arguments |could not be read"
)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One message of the policy's, what it called, and what it was answered before the next."""

    text: str
    calls: tuple[tuple[str, Any], ...]  # name, arguments; None where these are no JSON object
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    kind: str
    name: str
    weight: float
    value: Callable[[_Turn], float | None]
    once: bool  # judged for the whole conversation, paid at its last turn


class ProcessEvaluator(Evaluator):
    """Give every turn a reward by rules, and the rollout what `scalar` makes of them.

    Settings: `rules`, a list of objects with `rule`, `weight` (default 1; a penalty is negative)
    and `name` (default: the rule): `tool_error` (fraction of a turn's answers that match
    `error_pattern`; none where no tool answered), `malformed` (number of malformed calls and
    turns, by `malformed_pattern` or unreadable arguments), `well_formed` (1 where a turn has
    none), `calls` (number of calls, of `tool` where given), `pattern` (1 where the turn's text
    matches `pattern`), `no_pattern` (the opposite), `must_call` (once: 1 when `tool` was called
    at least `count` times, default 1), `turns` (once: the number of turns). `scalar`: `mean`,
    `sum`, `last` or `min` of the turns' rewards; the scalar is cut to `low` and `high`.
    """

    name = "process"
    description = "Rules over the turns give each turn a reward."
    needs_sandbox = False
    needs_messages = True

    def sample_payload(self, settings: JsonMap) -> JsonMap:  # noqa: ARG002
        """Return the empty payload: all is in the settings."""
        return {}

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:  # noqa: ARG002
        """Check names, rules, patterns and bounds."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        _rules(settings)
        read_choice(settings, "scalar", "mean", SCALARS)
        _bounds(settings)

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:  # noqa: ARG002
        """Apply the rules; a rollout without a turn earns 0, cut to `low` and `high`."""
        rules = _rules(settings)
        turns = _turns(artefacts.messages)
        values = {rule.name: _values(rule, turns) for rule in rules}
        earned = [
            _sum(
                [
                    rule.weight * value
                    for rule in rules
                    if (value := values[rule.name][n]) is not None
                ]
            )
            for n in range(len(turns))
        ]
        low, high = _bounds(settings)
        scalar = _scalar(read_choice(settings, "scalar", "mean", SCALARS), earned)
        reward = min(max(scalar, low), high)
        shown = {
            name: [None if value is None else round(value, 6) for value in of_turns[:500]]
            for name, of_turns in values.items()
        }
        hidden = max(0, artefacts.turns - len(turns))
        return Score(
            reward=reward,
            rewards={"reward": reward, **{name: _total(each) for name, each in values.items()}},
            details={
                "turns": len(turns),
                "turns_not_shown": hidden,
                "turn_rewards": earned[:500],
                "values": shown if len(turns) * len(rules) <= 3000 else {},
                "before_cut": scalar,
            },
            log=f"{len(turns)} turns, {sum(len(turn.calls) for turn in turns)} calls",
            turn_rewards=(*[None] * hidden, *earned)[:10_000],
        )


def _values(rule: _Rule, turns: Sequence[_Turn]) -> list[float | None]:
    if not rule.once:
        return [rule.value(turn) for turn in turns]
    if not turns:
        return []
    found = [value for turn in turns if (value := rule.value(turn)) is not None]
    total = math.fsum(found)
    if rule.kind.startswith("must_call:"):
        total = float(total >= int(rule.kind.partition(":")[2]))
    return [*[None] * (len(turns) - 1), total]


def _turns(messages: Sequence[JsonMap]) -> list[_Turn]:
    """Return the policy's turns; what stands before the first is the task."""
    turns: list[_Turn] = []
    for message in messages:
        content = _text(message.get("content"))
        if message.get("role") == "assistant":
            calls = tuple(_calls(message.get("tool_calls")))
            turns.append(_Turn(text=content, calls=calls, answers=()))
        elif turns:
            last = turns[-1]
            turns[-1] = _Turn(text=last.text, calls=last.calls, answers=(*last.answers, content))
    return turns


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content[:MAX_TEXT]
    if isinstance(content, list):  # parts
        texts = [str(part.get("text", "")) for part in content if isinstance(part, Mapping)]
        return "".join(texts)[:MAX_TEXT]
    return ""


def _calls(calls: Any) -> Iterator[tuple[str, Any]]:
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            yield "unreadable", None
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        yield str(function.get("name")), arguments if isinstance(arguments, Mapping) else None


def _malformed(turn: _Turn, pattern: re.Pattern[str]) -> int:
    unreadable = sum(name == "unreadable" or arguments is None for name, arguments in turn.calls)
    complaints = sum(pattern.search(answer) is not None for answer in turn.answers)
    return max(unreadable, complaints)


def _rules(settings: JsonMap) -> list[_Rule]:
    entries = settings.get("rules")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_RULES:
        raise InvalidSettings(
            f"process: 'rules' must be a list of 1 to {MAX_RULES} objects such as "
            '{"rule": "malformed", "weight": -0.1}'
        )
    errors = _pattern(settings, "error_pattern", ERRORS)
    malformed = _pattern(settings, "malformed_pattern", MALFORMED)
    rules = [_rule(entry, errors, malformed) for entry in entries]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1 or name == "reward":
            raise InvalidSettings(
                f"process: a rule's name {name!r} is taken; give each a 'name' of its own"
            )
    return rules


def _rule(entry: Any, errors: re.Pattern[str], malformed: re.Pattern[str]) -> _Rule:
    if not isinstance(entry, Mapping):
        raise InvalidSettings(f"process: a rule is {str(entry)[:100]!r}; it must be an object")
    kind = read_choice(entry, "rule", "", tuple(_PARTS))
    refuse_unknown(entry, {"rule", "weight", "name", *_PARTS[kind]}, evaluator=f"process {kind}")
    name = read_text(entry, "name", kind, most=100)
    weight = read_number(entry, "weight", 1.0)
    tool = read_text(entry, "tool", "", most=100) if "tool" in _PARTS[kind] else ""
    if not name or (kind == "must_call" and not tool):
        raise InvalidSettings(f"process: {kind}: write {'a name' if tool else 'the tool'} in it")

    def count_calls(turn: _Turn) -> float:
        return float(sum(not tool or called == tool for called, _ in turn.calls))

    def error_rate(turn: _Turn) -> float | None:
        failed = [errors.search(answer) is not None for answer in turn.answers]
        return sum(failed) / len(failed) if failed else None

    if kind in ("pattern", "no_pattern"):
        found = _pattern(entry, "pattern", None)
        wanted = kind == "pattern"
        value: Callable[[_Turn], float | None] = lambda turn: float(  # noqa: E731
            (found.search(turn.text) is not None) is wanted
        )
    else:
        value = {
            "tool_error": error_rate,
            "malformed": lambda turn: float(_malformed(turn, malformed)),
            "well_formed": lambda turn: float(not _malformed(turn, malformed)),
            "calls": count_calls,
            "must_call": count_calls,
            "turns": lambda _turn: 1.0,
        }[kind]
    if kind == "must_call":
        count = entry.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
            raise InvalidSettings("process: must_call: 'count' must be a whole number from 1")
        kind = f"must_call:{count}"
    once = kind == "turns" or kind.startswith("must_call")
    return _Rule(kind=kind, name=name, weight=weight, value=value, once=once)


_PARTS: Mapping[str, tuple[str, ...]] = {
    "tool_error": (),
    "malformed": (),
    "well_formed": (),
    "calls": ("tool",),
    "pattern": ("pattern",),
    "no_pattern": ("pattern",),
    "must_call": ("tool", "count"),
    "turns": (),
}


def _pattern(settings: JsonMap, name: str, default: str | None) -> re.Pattern[str]:
    source = read_text(settings, name, default or "", most=10_000)
    if not source:
        raise InvalidSettings(f"process: {name!r} must be the text of a regular expression")
    try:
        return re.compile(source, re.MULTILINE | re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidSettings(f"process: {name} {source[:200]!r} is wrong: {error}") from error


def _scalar(how: str, earned: Sequence[float]) -> float:
    if not earned:
        return 0.0
    if how == "last":
        return earned[-1]
    if how == "min":
        return min(earned)
    return _sum(earned if how == "sum" else [each / len(earned) for each in earned])


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _total(values: Sequence[float | None]) -> float:
    return _sum([value for value in values if value is not None])


def _bounds(settings: JsonMap) -> tuple[float, float]:
    low = -math.inf if settings.get("low") is None else finite(settings["low"], "setting 'low'")
    high = math.inf if settings.get("high") is None else finite(settings["high"], "setting 'high'")
    if low > high:
        raise InvalidSettings(f"setting 'low' is {low:g} and 'high' {high:g}; low must be lower")
    return low, high
