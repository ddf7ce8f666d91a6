"""Which evaluator does what a resources server of NeMo Gym does, and why others have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
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
# Keywords of a schema that hold values, and those that hold schemas by names of any kind.
_VALUES = frozenset({"const", "enum", "default", "example", "examples", "required"})
_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
_GRADING_MODES: Mapping[str, Mapping[str, Any]] = {
    "strict_single_letter_boxed": {"format": "boxed"},
    "lenient_boxed": {"format": "boxed"},
    "lenient_answer_colon": {"format": "answer_line"},
    "lenient_answer_colon_md": {"format": "answer_line"},
    "strict": {"format": "pattern", "pattern": r"<solution>\s*\[?([A-Za-z])\]?\s*</solution>"},
    "lenient": {
        "format": "pattern",
        # The first letter on its own. Atomic: text without an end tag is not searched again.
        "pattern": r"(?s)<solution>(?>(?:(?!</?solution>).)*?(?<![A-Za-z])([A-Za-z])(?![A-Za-z]))"
        r"(?=(?:(?!</?solution>).)*</solution>)",
    },
}
_USUAL_MODE = {"mcqa": "strict_single_letter_boxed", "swerl_llm_judge": "strict"}
_WITHOUT_MODES = frozenset({"gpqa_diamond", "bunsenbench_chemistry_mcq"})
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
        return partial(_choice, server=server)
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


def _choice(row: Mapping[str, Any], *, server: str) -> tuple[Scoring, Collection[str]]:
    payload = choice_payload(row["options"], row["expected_answer"])
    used = ("options", "expected_answer", "grading_mode")
    pattern = find(row, "template_metadata.output_regex")
    if pattern and server != "bunsenbench_chemistry_mcq":
        settings = {"format": "pattern", "pattern": _ignoring_case(pattern)}
        return Scoring(evaluator="choice", settings=settings, payload=payload), used
    return Scoring(evaluator="choice", settings=_by_mode(row, server), payload=payload), used


def _by_mode(row: Mapping[str, Any], server: str) -> Mapping[str, Any]:
    mode = row.get("grading_mode") or _USUAL_MODE.get(server)
    if mode is None or server in _WITHOUT_MODES:
        return NO_SETTINGS
    if mode not in _GRADING_MODES:
        known = ", ".join(_GRADING_MODES)
        raise TaskRejected(f"grading_mode is {mode!r}; known here are {known}")
    if find(row, "template_metadata.answer_prefix"):
        raise TaskRejected("template_metadata.answer_prefix is read by NeMo Gym only; remove it")
    return _GRADING_MODES[mode]


def _ignoring_case(pattern: Any) -> str:
    """Return a row's pattern, with one group, as NeMo Gym applies it."""
    if isinstance(pattern, list) and len(pattern) == 1:
        pattern = pattern[0]
    if not isinstance(pattern, str):
        raise TaskRejected("template_metadata.output_regex must be one pattern; name one")
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise TaskRejected(f"template_metadata.output_regex is no pattern: {error}") from error
    if groups > 1:
        raise TaskRejected("template_metadata.output_regex has several groups; leave one")
    flags = re.match(r"(\(\?[aimsux]+\))*", pattern)  # stay in front of all
    begin = flags.end() if flags else 0
    rest = pattern[begin:]
    return f"{pattern[:begin]}(?i:{rest})" if groups else f"{pattern[:begin]}(?i:({rest}))"


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
    payload = {"schema": _strict(as_json(row["schema_str"], "schema_str"))}
    return Scoring(evaluator="json_schema", payload=payload), ("schema_str",)


def _strict(schema: Any) -> Any:
    """Return a schema as NeMo Gym makes it strict: every property required, and no others.

    As there, the schemas in a list (anyOf, allOf) stay as they are.
    """
    if not isinstance(schema, Mapping):
        return schema
    strict = {name: _strict_keyword(name, value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        strict |= {"required": list(schema["properties"]), "additionalProperties": False}
    return strict


def _strict_keyword(name: str, value: Any) -> Any:
    if name in _VALUES:
        return value
    if name in _BY_NAME and isinstance(value, Mapping):
        return {each: _strict(schema) for each, schema in value.items()}
    return _strict(value)


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
