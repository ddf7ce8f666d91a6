"""What every row's task has to be before it is taken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.importers.base import TaskRecord, TaskRejected, json_copy
from rollouts.importers.options import ReadOptions

MAX_REF = 200


def make_record(
    *,
    ref: str,
    instruction: str,
    evaluator: str,
    settings: Mapping[str, Any],
    payload: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    **values: Any,
) -> TaskRecord:
    """Return a task whose evaluator takes its settings and payload; raise `TaskRejected`."""
    if not instruction.strip():
        raise TaskRejected("the instruction is empty; a task needs one")
    check_evaluator(evaluator, settings, payload)
    copies = _copies(
        {
            "evaluator_settings": settings,
            "evaluator_payload": payload,
            "metadata": metadata or {},
            "source": source or {},
        },
        instruction,
    )
    return TaskRecord(
        ref=check_ref(ref), instruction=instruction, evaluator=evaluator, **copies, **values
    )


def _copies(parts: Mapping[str, Mapping[str, Any]], instruction: str) -> dict[str, Any]:
    """Return copies of a task's parts; raise `TaskRejected` that names the one that is wrong."""
    try:
        copy = json_copy({**parts, "instruction": instruction}, "the task")
    except TaskRejected:
        for name, part in {"instruction": {"text": instruction}, **parts}.items():
            json_copy(part, name)
        raise
    del copy["instruction"]
    return copy


def check_evaluator(name: str, settings: Mapping[str, Any], payload: Mapping[str, Any]) -> None:
    """Raise `TaskRejected` when no evaluator has the name, or it could not work with these."""
    try:
        get_evaluator(name).validate(settings, payload)
    except EvaluatorFault as fault:
        raise TaskRejected(f"evaluator {name!r}: {fault}") from fault


def check_ref(ref: str) -> str:
    """Return a reference that a row can have; raise `TaskRejected`."""
    if not ref.strip():
        raise TaskRejected("the reference is empty; give each row one")
    if len(ref) > MAX_REF:
        raise TaskRejected(f"the reference has more than {MAX_REF} characters; shorten it")
    json_copy({"ref": ref}, "the reference")
    return ref


def content_ref(row: Mapping[str, Any]) -> str:
    """Return a reference for a row that has none: equal rows have equal ones."""
    text = json.dumps(row, sort_keys=True, default=str)
    return f"row-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def chosen_evaluator(options: ReadOptions) -> tuple[str, Mapping[str, Any]] | None:
    """Return the evaluator that the importing person named, with its settings."""
    return (options.evaluator, options.evaluator_settings) if options.evaluator else None


def find(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at `a.b` in a row, None where there is none; a whole name wins."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def as_text(value: Any) -> str:
    """Return a scalar as text: a reference, an answer."""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, str | int | float) else ""
