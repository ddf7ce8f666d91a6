"""Choose the evaluator of answers that data sets hold: math, code, choices, texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.importers.base import TaskRejected

NO_SETTINGS: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Hold how a task is scored: an evaluator's name, its settings and the task's payload."""

    evaluator: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)


def answer_scoring(evaluator: str, settings: Mapping[str, Any], truth: Any) -> Scoring:
    """Return how an evaluator scores an expected answer; raise `TaskRejected`."""
    if evaluator == "code":
        return Scoring(evaluator="code", settings=settings, payload=code_payload(truth))
    if evaluator == "json_schema":
        payload = {"schema": as_json(truth, "the schema")}
        return Scoring(evaluator=evaluator, settings=settings, payload=payload)
    if isinstance(truth, Mapping) and isinstance(truth.get("target"), Sequence):
        truth = truth["target"]  # search data sets hold the accepted answers there
    if isinstance(truth, str) and evaluator in ("math", "exact") and truth.startswith("["):
        truth = _listed(truth)
    return Scoring(evaluator=evaluator, settings=settings, payload={"answer": truth})


def code_payload(tests: Any) -> dict[str, Any]:
    """Return the tests of a programming task as the evaluator `code` takes them.

    `tests` is an object or the JSON text of one, with `inputs`, `outputs` and perhaps `fn_name`;
    or a list of `{input, output, testtype}`. Raises `TaskRejected`.
    """
    value = as_json(tests, "the tests")
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return {"tests": value}
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return {"test_list": value}
    if not isinstance(value, Mapping) or not value.get("inputs"):
        raise TaskRejected("the tests hold no inputs; a programming task needs some")
    inputs, outputs = value["inputs"], value.get("outputs")
    if not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise TaskRejected("the tests need as many outputs as inputs")
    payload = {"inputs": list(inputs), "outputs": list(outputs)}
    if value.get("fn_name"):
        payload["fn_name"] = value["fn_name"]
    return payload


def choice_payload(options: Any, answer: Any) -> dict[str, Any]:
    """Return the options by letter and the right letter, as the evaluator `choice` takes them."""
    found: dict[str, str] = {}
    if isinstance(options, Mapping):
        found = {str(letter): str(text) for letter, text in options.items()}
    elif isinstance(options, Sequence) and not isinstance(options, str):
        for place, option in enumerate(options):
            if isinstance(option, Mapping):
                found |= {str(letter): str(text) for letter, text in option.items()}
            else:
                found[chr(ord("A") + place)] = str(option)
    if not found:
        raise TaskRejected("the row has no options to choose from")
    return {"answer": answer, "options": found}


def as_json(value: Any, what: str) -> Any:
    """Return a value, or what its text is as JSON; raise `TaskRejected`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as fault:
        raise TaskRejected(f"{what} is not JSON: {str(fault)[:200]}") from fault


def _listed(text: str) -> Any:
    """Return the answers in a JSON list of texts, or the text itself: an interval, a vector."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    listed = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return value if listed else text
