"""verl's rows: which evaluator, which reference, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evaluators.base import Artefacts
from evaluators.registry import get_evaluator
from rollouts.importers.base import TaskRecord, TaskRejected
from rollouts.importers.options import ReadOptions
from rollouts.importers.verl import is_verl, read_verl_row

ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7, "answer": "It is 2.", "question": "1 + 1?"},
}
TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


def read(options: ReadOptions | None = None, **changes: Any) -> TaskRecord:
    return read_verl_row({**ROW, **changes}, options or ReadOptions())


def truth(value: Any, style: str = "rule") -> dict[str, Any]:
    return {"style": style, "ground_truth": value}


def test_a_row_is_read_whole_and_its_solution_stays_hidden() -> None:
    assert is_verl(ROW)
    assert read(tags=["x"]) == TaskRecord(
        ref="openai/gsm8k/train/7",
        instruction="1 + 1?",
        evaluator="math",
        evaluator_payload={"answer": "2"},
        metadata={"data_source": "openai/gsm8k", "ability": "math", "split": "train", "index": 7},
        source={"tags": ["x"], "extra_info": {"answer": "It is 2.", "question": "1 + 1?"}},
        environment={"agent": "single_turn"},
    )


@pytest.mark.parametrize(
    ("source", "ground_truth", "evaluator", "payload"),
    [
        ("math_dapo", "34", "math", {"answer": "34"}),
        ("aime_2024", 34, "math", {"answer": 34}),
        ("lighteval/MATH", "[0, 1)", "math", {"answer": "[0, 1)"}),
        ("math_dapo", '["1", "2"]', "math", {"answer": ["1", "2"]}),
        ("searchR1_nq", {"target": ["a", "b"]}, "regex", {"answer": ["a", "b"]}),
    ],
)
def test_the_data_source_chooses_the_evaluator(
    source: str, ground_truth: Any, evaluator: str, payload: dict[str, Any]
) -> None:
    record = read(data_source=source, reward_model=truth(ground_truth))
    assert (record.evaluator, record.evaluator_payload) == (evaluator, payload)


def test_what_is_not_known_is_scored_as_the_importing_person_says() -> None:
    with pytest.raises(TaskRejected, match=r'\[data_sources."mine"\] evaluator'):
        read(data_source="mine")
    for options in (
        ReadOptions(evaluator="exact"),
        ReadOptions(data_sources={"mi*": {"evaluator": "exact"}}),
    ):
        assert read(options, data_source="mine").evaluator == "exact"
    settings = {"casefold": True}
    rule = {"openai/*": {"evaluator": "exact", "settings": settings}}
    assert read(ReadOptions(data_sources=rule)).evaluator_settings == settings


def test_rows_without_an_index_are_told_apart_by_content() -> None:
    one, same = read(extra_info={}), read(extra_info=None)
    other = read(extra_info={}, ability="other")
    assert one.ref.startswith("row-")
    assert one.ref != other.ref
    assert same.source == one.source == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward_model": {}}, "ground_truth is missing"),
        ({"reward_model": 3}, "reward_model must be an object"),
        ({"data_source": "m", "reward_model": truth("x", "model")}, "style is 'model'"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "holds image"),
        ({"agent_name": "tool_agent"}, "asks for agent 'tool_agent' of verl's own"),
        ({"extra_info": {"need_tools_kwargs": True}}, "asks for tools"),
        (
            {"data_source": "codecontests", "reward_model": truth("{")},
            "the tests is not JSON|not JSON",
        ),
        (
            {"data_source": "taco", "reward_model": truth('{"inputs": ["1"], "outputs": []}')},
            "as many outputs as inputs",
        ),
        ({"reward_model": truth({"a": 1})}, "evaluator 'math'"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskRejected, match=reason):
        read(**changes)


def test_an_environment_with_tools_may_stand_in_for_verls_own() -> None:
    kwargs = {"need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {}}}}
    record = read(ReadOptions(tools="environment"), agent_name="tool_agent", extra_info=kwargs)
    assert record.source == {"agent_name": "tool_agent", "extra_info": kwargs}


@pytest.mark.parametrize("given", [TESTS, json.dumps(TESTS)])
def test_programming_tasks_bring_their_tests(given: Any) -> None:
    record = read(data_source="taco", reward_model=truth(given))
    assert (record.evaluator, record.evaluator_payload) == ("code", TESTS)


@pytest.mark.parametrize("name", ["images", "videos"])
def test_rows_with_pictures_are_refused_and_empty_columns_are_not(name: str) -> None:
    empty: dict[str, Any] = {name: []}
    full: dict[str, Any] = {name: [{"bytes": "x"}]}
    assert read(**empty).evaluator == "math"
    with pytest.raises(TaskRejected, match=f"the row has {name}"):
        read(**full)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("<answer>the Beatles.</answer>", 1.0), ("<answer>Beatles II</answer>", 0.0)],
)
def test_answers_to_searches_are_compared_without_case_articles_and_punctuation(
    said: str, reward: float
) -> None:
    record = read(data_source="searchR1_nq", reward_model=truth({"target": ["Beatles"]}))
    evaluator = get_evaluator(record.evaluator)
    artefacts = Artefacts(last_message=said)
    evaluator.validate(record.evaluator_settings, record.evaluator_payload)
    score = evaluator.score(record.evaluator_settings, record.evaluator_payload, artefacts)
    assert score.reward == reward
