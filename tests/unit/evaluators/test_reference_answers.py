"""The answer that an evaluator knows to be right earns everything from itself."""

from __future__ import annotations

from typing import Any

import pytest

from evaluators.base import Artefacts
from evaluators.registry import EVALUATORS, get_evaluator


@pytest.mark.parametrize(
    ("name", "settings", "payload"),
    [
        ("exact", {}, {"answer": ["42", "43"]}),
        ("math", {}, {"answer": r"\frac{1}{2}"}),
        ("math", {}, {"answer": r"So we get \boxed{7}."}),
        ("math", {"format": "answer_line"}, {"answer": "x=5"}),
        ("math", {"format": "whole"}, {"answer": 7}),
        ("choice", {}, {"answer": "Paris", "options": ["London", "Paris"]}),
        ("choice", {"format": "boxed"}, {"answer": ["D", "B"]}),
        ("choice", {"format": "answer_line"}, {"answer": ["D", "B"]}),
        ("choice", {"several": "all"}, {"answer": ["D", "B"]}),
        ("json_schema", {}, {"schema": {"type": "object"}, "answer": {"a": [1]}}),
        ("json_schema", {"format": "fenced"}, {"schema": True, "answer": "x"}),
    ],
)
def test_a_reference_answer_is_right(
    name: str, settings: dict[str, Any], payload: dict[str, Any]
) -> None:
    evaluator = get_evaluator(name)
    answer = evaluator.reference_answer(settings, payload)
    assert answer is not None
    assert evaluator.score(settings, payload, Artefacts(answer=answer)).reward == 1.0


@pytest.mark.parametrize(
    ("name", "settings", "payload"),
    [
        ("choice", {"format": "pattern", "pattern": "<(.)>"}, {"answer": "A"}),
        ("json_schema", {"schema": True}, {"expected": {"/a": 1}}),
        ("judge", {}, {"reference": "42"}),
        ("process", {}, {}),
        ("composite", {}, {}),
    ],
)
def test_where_none_is_known_none_is_made_up(
    name: str, settings: dict[str, Any], payload: dict[str, Any]
) -> None:
    assert get_evaluator(name).reference_answer(settings, payload) is None


def test_every_evaluator_takes_its_own_sample() -> None:
    settings: dict[str, dict[str, Any]] = {
        "process": {"rules": [{"rule": "turns"}]},
        "composite": {"children": [{"evaluator": "math"}, {"evaluator": "choice"}]},
        "judge": {"url": "http://judge/v1", "model": "m"},
    }
    for name in (
        "exact",
        "regex",
        "choice",
        "math",
        "json_schema",
        "judge",
        "process",
        "composite",
    ):
        chosen = settings.get(name, {})
        evaluator = EVALUATORS[name]
        evaluator.validate(chosen, evaluator.sample_payload(chosen))
