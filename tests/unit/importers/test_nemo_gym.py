"""Every row of NeMo Gym's own data becomes a task or is refused with its reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import Artefacts
from evaluators.registry import get_evaluator
from rollouts.importers.base import TaskRecord, TaskRejected
from rollouts.importers.formats import read_source
from rollouts.importers.nemo_gym import read_nemo_gym_row
from rollouts.importers.options import ReadOptions
from tests.nemo_gym import COUNTS, IMPORTED, all_counts, data_files, wheel_file

ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}], "temperature": 1},
    "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
    "uuid": "u-1",
    "expected_answer": "2",
    "level": 3,
}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    return all_counts(tmp_path_factory.mktemp("nemo-gym"))


def test_each_of_the_474_files_gives_what_was_looked_at(counts: dict[str, dict[str, int]]) -> None:
    assert len(counts) == 474
    assert counts == json.loads(COUNTS.read_text())


def test_no_row_is_lost(counts: dict[str, dict[str, int]]) -> None:
    for name in data_files():
        rows = sum(bool(line.strip()) for line in wheel_file(name).split(b"\n"))
        assert sum(counts[name].values()) == rows, name


def test_rollouts_are_refused_for_being_rollouts(counts: dict[str, dict[str, int]]) -> None:
    found: Counter[str] = Counter()
    for name, by_reason in counts.items():
        if name.endswith("/example_rollouts.jsonl"):
            found.update(by_reason)
    assert not [reason for reason in found if reason.startswith(IMPORTED)]
    assert found["the row is a finished rollout with its reward, not a task"] > 800


@pytest.mark.parametrize(
    ("name", "evaluator", "count"),
    [
        ("resources_servers/swebench/data/example.jsonl", "swe", 5),
        ("resources_servers/swebench_pro/data/example.jsonl", "swe", 5),
        ("resources_servers/swe_next/data/example.jsonl", "swe", 5),
        ("resources_servers/scale_swe/data/example.jsonl", "swe", 5),
        ("resources_servers/swemer_oml/data/example.jsonl", "script", 5),
        ("responses_api_agents/mini_swe_agent/data/example.jsonl", "swe", 5),
        ("environments/claude_code_math/data/example.jsonl", "math", 5),
        ("resources_servers/mcqa/data/example.jsonl", "choice", 5),
        ("resources_servers/code_gen/data/example.jsonl", "code", 5),
    ],
)
def test_what_these_are_scored_by(
    counts: dict[str, dict[str, int]], name: str, evaluator: str, count: int
) -> None:
    assert counts[name].get(f"{IMPORTED}: {evaluator}") == count


def test_swe_bench_rows_say_how_they_are_graded(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(wheel_file("resources_servers/swebench/data/example.jsonl"))
    first = next(read_source(path, "nemo_gym", ReadOptions())).entry
    assert isinstance(first, TaskRecord)
    assert first.ref == "astropy__astropy-12907"
    assert first.image == ("docker://swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest")
    payload = first.evaluator_payload
    assert payload["log_parser"] == "parse_log_astropy"
    assert payload["test_cmd"].endswith("astropy/modeling/tests/test_separable.py")
    assert len(payload["fail_to_pass"]) == 2
    assert first.solution["patch.diff"].data.startswith(b"diff --git a/astropy/modeling/sep")
    shown = json.dumps([first.instruction, *first.messages, first.metadata])
    assert "FAIL_TO_PASS" not in shown
    assert "diff --git" not in shown


def test_a_row_keeps_what_is_not_used_and_hides_it() -> None:
    record = read_nemo_gym_row(ROW, ReadOptions())
    assert (record.ref, record.evaluator, record.evaluator_payload) == (
        *("u-1", "math"),
        {"answer": "2"},
    )
    assert record.metadata == {"resources_server": "math_with_judge"}
    assert record.source == {
        "agent_ref": ROW["agent_ref"],
        "uuid": "u-1",
        "level": 3,
        "responses_create_params": {"temperature": 1},
    }


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"responses_create_params": None}, {}, "no responses_create_params"),
        ({"reward": 1.0}, {}, "a finished rollout"),
        (
            {"responses_create_params": {"input": "x", "tools": [{"name": "calc"}]}},
            {},
            r"brings tools that its own server carries out \(calc\)",
        ),
        ({"responses_create_params": {"input": "x", "instructions": "y"}}, {}, "stands beside"),
        ({"agent_ref": None}, {"verifier": "physics_judge"}, "scored by a judge"),
        ({"agent_ref": None}, {"verifier": "wordle"}, "'wordle' verifies answers by code of its"),
        ({"expected_answer": None}, {"evaluator": "exact"}, "the row has none of expected_answer"),
        ({"schema_str": "{}", "schema_type": "xml"}, {"verifier": "s"}, "the answer is xml"),
    ],
)
def test_what_has_no_evaluator_here_is_refused(
    changes: dict[str, Any], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(TaskRejected, match=reason):
        read_nemo_gym_row({**ROW, **changes}, ReadOptions.from_dict(options))


def test_an_evaluator_may_be_named_for_rows_of_any_server() -> None:
    options = ReadOptions(verifier="physics_judge", evaluator="exact")
    assert read_nemo_gym_row(ROW, options).evaluator == "exact"


def reward_of(record: TaskRecord, said: str) -> float | None:
    """Return what an answer to a task is worth."""
    settings, payload = record.evaluator_settings, record.evaluator_payload
    evaluator = get_evaluator(record.evaluator)
    evaluator.validate(settings, payload)
    return evaluator.score(settings, payload, Artefacts(last_message=said)).reward


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {
            "type": "array",
            "items": {"type": "object", "properties": {"properties": {"type": "integer"}}},
        },
        "more": {"$ref": "#/$defs/more"},
    },
    "$defs": {"more": {"type": "object", "properties": {"x": {"enum": [{"properties": {}}, 1]}}}},
}


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ({"name": "a", "parts": [{"properties": 1}], "more": {"x": 1}}, 1.0),
        ({"name": "a", "parts": [], "more": {"x": {"properties": {}}}}, 1.0),
        ({}, 0.0),
        ({"name": "a", "parts": [], "more": {"x": 1}, "other": 1}, 0.0),
        ({"name": "a", "parts": [{}], "more": {"x": 1}}, 0.0),
        ({"name": "a", "parts": [], "more": {}}, 0.0),
    ],
)
def test_schemas_are_as_strict_as_nemo_gym_makes_them(said: Any, reward: float) -> None:
    row = {**ROW, "schema_str": json.dumps(SCHEMA), "schema_type": "json", "agent_ref": None}
    record = read_nemo_gym_row(row, ReadOptions(verifier="structured_outputs"))
    assert reward_of(record, json.dumps(said)) == reward


def choice_row(**changes: Any) -> dict[str, Any]:
    options = [{"A": "one"}, {"B": "two"}]
    return {**ROW, "agent_ref": None, "options": options, "expected_answer": "B", **changes}


def output_regex(pattern: Any) -> dict[str, Any]:
    return {"template_metadata": {"output_regex": pattern}}


@pytest.mark.parametrize(
    ("server", "changes", "said", "reward"),
    [
        ("mcqa", {}, r"It is \boxed{B}", 1.0),
        ("mcqa", {}, "Answer: B", 0.0),
        ("mcqa", {"grading_mode": "lenient_boxed"}, r"\boxed{two}", 1.0),
        ("mcqa", {"grading_mode": "lenient_answer_colon"}, "Answer: B", 1.0),
        ("mcqa", {"grading_mode": "lenient_answer_colon"}, r"\boxed{B}", 0.0),
        ("mcqa", output_regex(r"Final Choice:\s*([A-Z])"), "final choice: b", 1.0),
        ("mcqa", output_regex(r"(?m)^Final:\s*([A-Z])$"), "so\nfinal: b\n", 1.0),
        ("mcqa", output_regex([r"(?<=so )[A-Z]\b"]), "A, so B", 1.0),
        ("mcqa", output_regex(r"Final Choice:\s*([A-Z])"), "Answer: B", 0.0),
        ("gpqa_diamond", {"grading_mode": "strict_single_letter_boxed"}, "Answer: B", 1.0),
        ("swerl_llm_judge", {"grading_mode": "strict"}, "<solution>[B]</solution>", 1.0),
        ("swerl_llm_judge", {"grading_mode": "strict"}, "<solution>B it is</solution>", 0.0),
        ("swerl_llm_judge", {"grading_mode": "lenient"}, "<solution>It is B</solution>", 1.0),
        ("swerl_llm_judge", {"grading_mode": "lenient"}, "<solution>B, not A</solution>", 1.0),
        ("swerl_llm_judge", {"grading_mode": "lenient"}, "<solution>It is B", 0.0),
        ("swerl_llm_judge", {"grading_mode": "lenient"}, "<solution>B " * 20_000, 0.0),
        ("swerl_llm_judge", {"grading_mode": "lenient"}, "Answer: B", 0.0),
    ],
)
def test_choices_are_read_as_the_row_says(
    server: str, changes: dict[str, Any], said: str, reward: float
) -> None:
    record = read_nemo_gym_row(choice_row(**changes), ReadOptions(verifier=server))
    assert reward_of(record, said) == reward


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grading_mode": "other"}, "grading_mode is 'other'; known here are strict_single"),
        ({"template_metadata": {"answer_prefix": "R:"}}, "answer_prefix is read by NeMo Gym only"),
        (output_regex(["(a)", "(b)"]), "must be one pattern"),
        (output_regex("("), "output_regex is no pattern"),
        (output_regex("(a)(b)"), "several groups"),
    ],
)
def test_choices_read_in_other_ways_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TaskRejected, match=reason):
        read_nemo_gym_row(choice_row(**changes), ReadOptions(verifier="mcqa"))
