"""What a score may be, and that no evaluator answers with anything else, whatever it is given."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluators import wire
from evaluators.base import (
    MAX_DETAILS_BYTES,
    MAX_LOG_CHARACTERS,
    Artefacts,
    EvaluatorFault,
    RewardMalformed,
    Score,
)
from evaluators.registry import get_evaluator


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, True, "1", None, [1], {"a": 1}, 1j]
)
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(RewardMalformed, match="the reward 'reward'"):
        Score(reward=value, rewards={})
    with pytest.raises(RewardMalformed, match="the reward 'style'"):
        Score(reward=0.0, rewards={"style": value})
    if value is not None:
        with pytest.raises(RewardMalformed, match="the reward of turn 1"):
            Score(reward=0.0, rewards={}, turn_rewards=(0.0, value))


@pytest.mark.parametrize("names", [[""], ["a" * 201], [5], [str(n) for n in range(1001)]])
def test_names_are_short_flat_and_not_too_many(names: list[Any]) -> None:
    with pytest.raises(RewardMalformed, match="name"):
        Score(reward=0.0, rewards=dict.fromkeys(names, 0.0))


@pytest.mark.parametrize(
    ("details", "word"),
    [
        ({"a": math.nan}, "not JSON"),
        ({"a": object()}, "not JSON"),
        ({"a": {1, 2}}, "not JSON"),
        ({("a",): 1}, "not JSON"),
        ({"a": "x" * MAX_DETAILS_BYTES}, f"more than {MAX_DETAILS_BYTES}"),
    ],
)
def test_details_are_json_of_a_bounded_size(details: dict[Any, Any], word: str) -> None:
    with pytest.raises(RewardMalformed, match=word):
        Score(reward=0.0, rewards={}, details=details)


def test_details_nested_without_end_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RewardMalformed, match="not JSON"):
        Score(reward=0.0, rewards={}, details={"deep": deep})


def test_of_a_long_log_the_end_is_kept() -> None:
    assert Score(reward=0.0, rewards={}, log="a" * 10 + "b" * MAX_LOG_CHARACTERS).log == (
        "b" * MAX_LOG_CHARACTERS
    )


def test_a_score_crosses_the_process_boundary_whole() -> None:
    score = Score(
        reward=0.5, rewards={"a": 1.0}, details={"b": [1]}, log="c", turn_rewards=(None, 0.25)
    )
    assert wire.unpack_outcome(wire.pack_outcome(score)) == score


PATTERN = {"evaluator": "regex", "settings": {"pattern": r"\d+"}}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("exact", {"numeric": True, "strip_punctuation": True}, {"answer": ["42", "x"]}),
    ("regex", {"pattern": r"(\w+)", "take": "last"}, {"answer": "42"}),
    ("choice", {}, {"answer": "B", "options": ["London", "Paris"]}),
    ("math", {"seconds": 0.3}, {"answer": "42"}),
    ("math", {"multiple": "all", "tail_characters": 20, "seconds": 0.3}, {"answer": r"\frac12"}),
    ("json_schema", {}, {"schema": {"type": "object"}, "expected": {"/a/0": 1}}),
    (
        "process",
        {"rules": [{"rule": "malformed"}, {"rule": "tool_error"}, {"rule": "turns"}]},
        {},
    ),
    ("composite", {"children": [PATTERN, {"evaluator": "choice"}]}, {"answer": "A"}),
]
pieces = st.sampled_from(
    [
        *(r"\boxed{", "}", "Answer:", "####", "$", "{", "[", '"a"', ":", "1", "-", "e9", ".", "/"),
        *(r"\frac", r"\sqrt", "^", "(", ")", " or ", "A", "B.", "**", "\n", "```json\n", "```"),
        *("</think>", "NaN", "\0", "\ud800", "\u0661", "\U0001d7d9", "\u2212", ","),
    ]
)
texts = st.none() | st.text(max_size=80) | st.lists(pieces, max_size=15).map("".join)


@pytest.mark.parametrize(("name", "chosen", "payload"), CASES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(answer=texts, message=texts)
def test_whatever_the_answer_a_score_is_finite(
    name: str,
    chosen: dict[str, Any],
    payload: dict[str, Any],
    answer: str | None,
    message: str | None,
) -> None:
    evaluator = get_evaluator(name)
    evaluator.validate(chosen, payload)
    artefacts = Artefacts(
        answer=answer,
        last_message=message or "",
        messages=({"role": "assistant", "content": answer}, {"role": "tool", "content": message}),
        turns=1,
    )
    with suppress(EvaluatorFault):  # everything else is a crash
        score = evaluator.score(chosen, payload, artefacts)
        assert all(map(math.isfinite, (score.reward, *score.rewards.values())))
        assert json.loads(wire.pack_outcome(score))["score"]["reward"] == score.reward


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(("name", "chosen", "payload"), CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_the_settings_they_are_used_or_refused(
    name: str, chosen: dict[str, Any], payload: dict[str, Any], data: st.DataObject
) -> None:
    evaluator = get_evaluator(name)
    wrong = dict(chosen)
    known = [
        *chosen,
        "source",
        "seconds",
        "low",
        "scalar",
        "letters",
        "options",
        "schema",
        "answer",
    ]
    wrong[data.draw(st.sampled_from(known))] = data.draw(json_values)
    other = dict(payload)
    if other and data.draw(st.booleans()):
        other[data.draw(st.sampled_from(sorted(other)))] = data.draw(json_values)
    with suppress(EvaluatorFault):  # everything else is a crash
        evaluator.validate(wrong, other)
