"""Read plain tasks: rows with our own fields, or with columns that a mapping names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.handlers.base import Message
from rollouts.handlers.conversation import InvalidConversation, check_conversation
from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected, json_copy
from rollouts.importers.checks import as_text, content_ref, find, make_record
from rollouts.importers.options import ReadOptions
from rollouts.importers.prompts import read_prompt
from rollouts.importers.rows import read_rows

DEFAULT_EVALUATOR = "exact"
KNOWN = frozenset(
    {"ref", "instruction", "answer", "evaluator", "evaluator_settings", "metadata", "messages"}
)
OWN_FIELDS = KNOWN | {"evaluator_payload"}


def read_jsonl(
    path: Path,
    *,
    evaluator: str = DEFAULT_EVALUATOR,
    evaluator_settings: Mapping[str, Any] | None = None,
) -> Iterator[TaskRecord | RejectedTask]:
    """Read one task a line, as `read_plain_row` does; a bad line never hides the others.

    Raises OSError when the file cannot be read.
    """
    options = ReadOptions(evaluator=evaluator, evaluator_settings=evaluator_settings or {})
    for row in read_rows(path):
        where = Path(f"{path}:{row.number}")
        try:
            if row.value is None:
                raise TaskRejected(row.reason)
            yield read_plain_row(row.value, options)
        except TaskRejected as error:
            yield RejectedTask(path=where, reason=str(error), raw=row.raw)


def read_plain_row(row: Mapping[str, Any], options: ReadOptions) -> TaskRecord:
    """Read one row; raise `TaskRejected`.

    It holds `ref`, `instruction`, `answer` (hidden from the agent) and optionally `evaluator`,
    `evaluator_settings`, `evaluator_payload`, `metadata` and `messages`, the conversation that
    the agent goes on from; the options' evaluator scores what names none of its own.
    """
    if options.mapping:
        return _read_mapped(row, options)
    unknown = sorted(set(row) - OWN_FIELDS)
    if unknown:
        raise TaskRejected(
            f"unknown field {unknown[0]!r}; put what is yours under 'metadata', or say with a "
            f"mapping which column is what (known: {', '.join(sorted(OWN_FIELDS))})"
        )
    for name in ("ref", "instruction"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise TaskRejected(f"{name!r} must be a text that is not empty")
        json_copy({name: row[name]}, name)
    if len(row["ref"]) > 200:
        raise TaskRejected("'ref' has more than 200 characters; shorten it")
    if "answer" not in row and "evaluator_payload" not in row:
        raise TaskRejected("'answer' is missing; add the expected answer")
    for name in ("evaluator_settings", "evaluator_payload", "metadata"):
        if not isinstance(row.get(name, {}), dict):
            raise TaskRejected(f"{name!r} must be an object")
    payload = dict(row.get("evaluator_payload", {}))
    if "answer" in row:
        payload["answer"] = row["answer"]
    name, settings = _evaluator(row, options)
    return _record(
        ref=row["ref"],
        instruction=row["instruction"],
        evaluator=name,
        settings=settings,
        payload=payload,
        metadata=row.get("metadata", {}),
        messages=_messages(row),
    )


def _record(**values: Any) -> TaskRecord:
    name, settings, payload = values["evaluator"], values["settings"], values["payload"]
    try:
        scorer = get_evaluator(str(name))
        scorer.validate(settings, payload)
    except EvaluatorFault as fault:
        raise TaskRejected(str(fault)) from fault
    if scorer.name == "script":
        raise TaskRejected(f"evaluator {name!r} needs test files, which a line cannot carry")
    asked = {"agent": "single_turn"} if scorer.name == "code" else {}
    asked |= values.pop("environment", {})
    return make_record(**{**values, "payload": json_copy(payload, "answer")}, environment=asked)


def _evaluator(row: Mapping[str, Any], options: ReadOptions) -> tuple[str, Mapping[str, Any]]:
    name = row.get("evaluator", options.evaluator or DEFAULT_EVALUATOR)
    inherited = options.evaluator_settings if "evaluator" not in row else {}
    return str(name), row.get("evaluator_settings", inherited)


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "messages" not in row:
        return ()
    try:
        return tuple(check_conversation(row["messages"]))
    except InvalidConversation as error:
        raise TaskRejected(f"messages: {error}") from error


def _read_mapped(row: Mapping[str, Any], options: ReadOptions) -> TaskRecord:
    """Read a row through a mapping; columns that nothing is mapped to are kept, hidden."""
    values = {name: find(row, column) for name, column in options.mapping.items()}
    for name, column in options.mapping.items():
        if values[name] is None:
            raise TaskRejected(f"column {column!r}, mapped to {name!r}, is missing or null")
    for name in ("evaluator_settings", "evaluator_payload", "metadata"):
        if not isinstance(values.get(name, {}), Mapping):
            raise TaskRejected(f"{name!r} must be an object")
    prompt = values.get("messages", values.get("instruction"))
    if prompt is None:
        raise TaskRejected("nothing is mapped to 'instruction' or 'messages'")
    where = "messages" if "messages" in values else "instruction"
    instruction, messages = read_prompt(prompt, where)
    payload = dict(values.get("evaluator_payload", {}))
    if "answer" in values:
        payload["answer"] = values["answer"]
    name, settings = _evaluator(values, options)
    mapped = set(options.mapping.values())
    return _record(
        ref=as_text(values["ref"]) if "ref" in values else content_ref(row),
        instruction=as_text(values.get("instruction")) or instruction,
        evaluator=name,
        settings=settings,
        payload=payload,
        metadata=values.get("metadata", {}),
        messages=messages,
        image=as_text(values.get("image")) or None,
        source={column: each for column, each in row.items() if column not in mapped},
        environment={"workdir": values["workdir"]} if "workdir" in values else {},
    )
