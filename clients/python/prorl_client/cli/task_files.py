"""Tasks out of a file with one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from prorl_client.errors import ConfigError
from prorl_client.submissions import InlineTask

FIELDS = ("environment", "instruction", "payload", "hidden", "metadata", "messages")
SHORT = ("ref", "answer", "evaluator", "evaluator_settings")


class BadTask(ConfigError):
    """A line that is no task."""


def read_entries(path: str) -> Iterator[dict[str, Any]]:
    """Yield a group's entry for each line: a reference as text, or the API's own object.

    Raises BadTask.
    """
    for number, row in _rows(path):
        if isinstance(row, str):
            yield {"task_ref": row}
        elif isinstance(row, dict) and {"task", "task_ref", "inline"} & row.keys():
            yield row
        else:
            raise BadTask(
                f"{path}:{number}: write a task's reference as text, or an object with one of "
                "task, task_ref and inline; `prorl tasks import` takes whole tasks."
            )


def read_tasks(path: str, *, environment: str | None) -> Iterator[InlineTask]:
    """Yield a whole task for each line.

    A line has `instruction` and, unless it is given here, `environment`; then `payload`, `hidden`,
    `metadata` and `messages` as the API has them, or the service's own import format: `ref`,
    `answer`, `evaluator`, `evaluator_settings`. Raises BadTask.
    """
    for number, row in _rows(path):
        if not isinstance(row, dict):
            raise BadTask(f"{path}:{number}: a task is a JSON object.")
        unknown = sorted(row.keys() - {*FIELDS, *SHORT})
        if unknown:
            known = ", ".join((*FIELDS, *SHORT))
            raise BadTask(
                f"{path}:{number}: unknown field {unknown[0]!r}; put what is yours under metadata "
                f"(known: {known})."
            )
        yield _task(row, f"{path}:{number}", environment)


def _task(row: Mapping[str, Any], where: str, environment: str | None) -> InlineTask:
    named = row.get("environment") or environment
    if not named:
        raise BadTask(f"{where}: it has no environment; add it, or give --environment.")
    if not isinstance(row.get("instruction"), str):
        raise BadTask(f"{where}: it has no instruction.")
    for name in ("payload", "hidden", "metadata", "evaluator_settings"):
        if not isinstance(row.get(name, {}), dict):
            raise BadTask(f"{where}: {name} must be an object.")
    hidden, metadata = dict(row.get("hidden", {})), dict(row.get("metadata", {}))
    if "answer" in row:
        hidden.setdefault("evaluator_payload", {})["answer"] = row["answer"]
    for name in ("evaluator", "evaluator_settings"):
        if name in row:
            hidden[name] = row[name]
    if "ref" in row:
        metadata.setdefault("ref", row["ref"])
    return InlineTask(
        environment=named,
        instruction=row["instruction"],
        payload=row.get("payload", {}),
        hidden=hidden,
        metadata=metadata,
        messages=tuple(row.get("messages", ())),
    )


def _rows(path: str) -> Iterator[tuple[int, Any]]:
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as fault:
        raise BadTask(f"{path} cannot be read: {fault}") from fault


def _open(path: str) -> IO[str]:
    return sys.stdin if path == "-" else Path(path).open(encoding="utf-8")


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise BadTask(f"{where}: not JSON: {fault}") from fault
