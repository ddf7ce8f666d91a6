"""Read tasks from a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.handlers.base import Message
from rollouts.handlers.conversation import InvalidConversation, check_conversation
from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected, json_copy
from rollouts.importers.folder import decode_text

MAX_LINE_BYTES = 10_000_000
KNOWN = frozenset(
    {"ref", "instruction", "answer", "evaluator", "evaluator_settings", "metadata", "messages"}
)


def read_jsonl(
    path: Path,
    *,
    evaluator: str = "exact",
    evaluator_settings: Mapping[str, Any] | None = None,
) -> Iterator[TaskRecord | RejectedTask]:
    """Read one task a line; empty lines are passed over, a bad line never hides the others.

    A line holds `ref`, `instruction`, `answer` (hidden from the agent) and optionally
    `evaluator`, `evaluator_settings`, `metadata` and `messages`, the conversation that an agent
    such as `branch` goes on from; the arguments are used where a line names no evaluator of its
    own. Raises `OSError` when the file cannot be read.
    """
    seen: dict[str, int] = {}
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not line.strip():
                continue
            where = Path(f"{path}:{number}")
            if len(line) > MAX_LINE_BYTES:
                reason = f"the line has more than {MAX_LINE_BYTES} bytes, and reading ends here"
                yield RejectedTask(path=where, reason=reason)
                return
            try:
                record = _read_line(line, evaluator, evaluator_settings or {})
            except TaskRejected as error:
                yield RejectedTask(path=where, reason=str(error))
                continue
            if record.ref in seen:
                reason = f"ref {record.ref!r} is taken by line {seen[record.ref]}; choose another"
                yield RejectedTask(path=where, reason=reason)
                continue
            seen[record.ref] = number
            yield record


def _read_line(line: bytes, evaluator: str, settings: Mapping[str, Any]) -> TaskRecord:
    try:
        row = json.loads(decode_text(line, "the line"))
    except (ValueError, RecursionError) as error:
        raise TaskRejected(f"the line is not JSON: {error}; mend it") from error
    if not isinstance(row, dict):
        raise TaskRejected("the line is not a JSON object")
    unknown = sorted(set(row) - KNOWN)
    if unknown:
        raise TaskRejected(
            f"unknown field {unknown[0]!r}; put what is yours under 'metadata' "
            f"(known: {', '.join(sorted(KNOWN))})"
        )
    for name in ("ref", "instruction"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise TaskRejected(f"{name!r} must be a text that is not empty")
        json_copy({name: row[name]}, name)
    if len(row["ref"]) > 200:
        raise TaskRejected("'ref' has more than 200 characters; shorten it")
    if "answer" not in row:
        raise TaskRejected("'answer' is missing; add the expected answer")
    for name in ("evaluator_settings", "metadata"):
        if not isinstance(row.get(name, {}), dict):
            raise TaskRejected(f"{name!r} must be an object")
    name = row.get("evaluator", evaluator)
    own = row.get("evaluator_settings", settings if "evaluator" not in row else {})
    payload = {"answer": row["answer"]}
    try:
        scorer = get_evaluator(str(name))
        scorer.validate(own, payload)
    except EvaluatorFault as fault:
        raise TaskRejected(str(fault)) from fault
    if scorer.needs_sandbox:
        raise TaskRejected(f"evaluator {name!r} needs test files, which a line cannot carry")
    return TaskRecord(
        ref=row["ref"],
        instruction=row["instruction"],
        evaluator=scorer.name,
        evaluator_settings=json_copy(own, "evaluator_settings"),
        evaluator_payload=json_copy(payload, "answer"),
        metadata=json_copy(row.get("metadata", {}), "metadata"),
        messages=_messages(row),
    )


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    if "messages" not in row:
        return ()
    try:
        return tuple(check_conversation(row["messages"]))
    except InvalidConversation as error:
        raise TaskRejected(f"messages: {error}") from error
