"""Which evaluator does what a resources server of NeMo Gym does, and why others have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollouts.importers.base import TaskRejected
from rollouts.importers.checks import as_text, chosen_evaluator, find
from rollouts.importers.evaluator_choice import (
    NO_SETTINGS,
    Scoring,
    answer_scoring,
    as_json,
    choice_payload,
    code_payload,
)
from rollouts.importers.options import ReadOptions

Rule = Callable[[Mapping[str, Any]], tuple[Scoring, Collection[str]]]

ANSWERS = (
    *("expected_answer", "answer", "expected_result", "expected_output", "target", "gold_answer"),
    *("ground_truth", "outputs", "expected_answers"),
)
_BY_JUDGE = re.compile(r"judge|grader|simpleqa|omniscience|arena|genrm|hle|rubric")
_ENDS_MATH = re.compile(r"(^|_)math$|^math_with_(judge|autograder|code)$|^(polymath|ns_tools)$")
_LETTERS = frozenset({"mcqa", "gpqa_diamond", "bunsenbench_chemistry_mcq", "swerl_llm_judge"})
_BOXED = r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}"


def choose_scoring(
    row: Mapping[str, Any], server: str, options: ReadOptions
) -> tuple[Scoring, Collection[str]]:
    """Return how a row is scored, and the columns that say so; raise `TaskRejected`."""
    chosen = chosen_evaluator(options)
    if chosen is not None:
        return _as_asked(row, *chosen)
    rule = _rule_of(row, server)
    if rule is not None:
        return rule(row)
    name = f"resources server {server!r}" if server else "the row"
    if _BY_JUDGE.search(server):
        raise TaskRejected(
            f"{name} has answers scored by a judge; name one (evaluator judge and its settings)"
        )
    raise TaskRejected(
        f"{name} verifies answers by code of its own, which no evaluator here is known to equal; "
        "name an evaluator that fits"
    )


def _as_asked(
    row: Mapping[str, Any], evaluator: str, settings: Mapping[str, Any]
) -> tuple[Scoring, Collection[str]]:
    column = next((name for name in ANSWERS if row.get(name) not in (None, "")), None)
    if column is None:
        raise TaskRejected(f"the row has none of {', '.join(ANSWERS)} to compare an answer with")
    if evaluator == "choice":
        payload = choice_payload(row.get("options"), row[column])
        return Scoring(evaluator="choice", settings=settings, payload=payload), (column, "options")
    return answer_scoring(evaluator, settings, row[column]), (column,)


def _rule_of(row: Mapping[str, Any], server: str) -> Rule | None:
    if find(row, "verifier_metadata.unit_tests"):
        return _unit_tests
    if find(row, "verifier_metadata.test") and find(row, "verifier_metadata.entry_point"):
        return _check_function
    if "options" in row and "expected_answer" in row and server in (*_LETTERS, ""):
        return _choice
    if as_text(row.get("schema_str")):
        return _schema
    if server == "string_match":
        return _string_match
    if server == "spartqa":
        return _final_answer
    if _is_math(row, server):
        return _math
    return None


def _is_math(row: Mapping[str, Any], server: str) -> bool:
    if server == "ns_tools":
        return as_text(row.get("verifier_type")).startswith("math")
    if server.startswith("verifiers"):
        return "math" in as_text(row.get("vf_env_id"))
    return bool(_ENDS_MATH.search(server))


def _math(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    for name in ("expected_answer", "expected_result", "answer"):
        if row.get(name) not in (None, ""):
            return answer_scoring("math", NO_SETTINGS, row[name]), (name,)
    raise TaskRejected("the row has no expected_answer")


def _choice(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    payload = choice_payload(row["options"], row["expected_answer"])
    return Scoring(evaluator="choice", payload=payload), ("options", "expected_answer")


def _unit_tests(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    payload = code_payload(find(row, "verifier_metadata.unit_tests"))
    return Scoring(evaluator="code", payload=payload), ("verifier_metadata",)


def _check_function(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    test = as_text(find(row, "verifier_metadata.test"))
    if "def check(" not in test:
        raise TaskRejected("the tests are no check(candidate) function, as `code` runs them")
    setup = as_text(find(row, "verifier_metadata.setup_code"))
    payload = {
        "test": f"{setup}\n\n{test}" if setup else test,
        "entry_point": as_text(find(row, "verifier_metadata.entry_point")),
    }
    return Scoring(evaluator="code", payload=payload), ()


def _schema(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    kind = as_text(row.get("schema_type")) or "json"
    if kind != "json":
        raise TaskRejected(f"the answer is {kind}; only JSON is checked against a schema here")
    payload = {"schema": as_json(row["schema_str"], "schema_str")}
    return Scoring(evaluator="json_schema", payload=payload), ("schema_str",)


def _string_match(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    mode = as_text(row.get("extraction_mode"))
    used = ("expected_answer", "extraction_mode", "case_sensitive")
    cased = {} if row.get("case_sensitive") else {"casefold": True}
    if mode != "boxed":
        raise TaskRejected(f"extraction_mode {mode!r} is NeMo Gym's own; only boxed is known here")
    settings = {"pattern": _BOXED, "take": "last", **cased}
    payload = {"answer": row.get("expected_answer")}
    return Scoring(evaluator="regex", settings=settings, payload=payload), used


def _final_answer(row: Mapping[str, Any]) -> tuple[Scoring, Collection[str]]:
    settings = {
        "pattern": r"(?im)^\W*final answer\s*:\s*(.+?)\W*$",
        "take": "last",
        "casefold": True,
    }
    payload = {"answer": row.get("target")}
    return Scoring(evaluator="regex", settings=settings, payload=payload), ("target", "options")
