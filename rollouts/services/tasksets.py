"""Task sets: importing records, idempotent by content."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction

from rollouts.importers.base import RejectedTask, TaskRecord, encode_files
from rollouts.models import Task, TaskSet
from sandboxes.models import Environment

CHUNK = 200


@dataclass
class ImportReport:
    """What an import did: counts, and each refused task with its reason."""

    created: int = 0
    changed: int = 0
    unchanged: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)


def import_tasks(
    *,
    name: str,
    records: Iterable[TaskRecord | RejectedTask],
    environment_of: Callable[[TaskRecord], Environment],
    description: str = "",
) -> ImportReport:
    """Create or update a task set from records; what is refused is reported, the rest imported."""
    report = ImportReport()
    task_set, _created = TaskSet.objects.get_or_create(
        name=name, defaults={"description": description}
    )
    chunk: list[TaskRecord] = []
    for record in records:
        if isinstance(record, RejectedTask):
            report.rejected.append((str(record.path), record.reason))
            continue
        chunk.append(record)
        if len(chunk) >= CHUNK:
            _write(task_set, chunk, environment_of, report)
            chunk = []
    _write(task_set, chunk, environment_of, report)
    return report


def _write(
    task_set: TaskSet,
    chunk: list[TaskRecord],
    environment_of: Callable[[TaskRecord], Environment],
    report: ImportReport,
) -> None:
    with transaction.atomic():
        known = {
            task.ref: task
            for task in task_set.tasks.filter(ref__in=[record.ref for record in chunk])
        }
        for record in chunk:
            values = _values(record, environment_of(record))
            task = known.get(record.ref)
            if task is None:
                known[record.ref] = Task.objects.create(task_set=task_set, ref=record.ref, **values)
                report.created += 1
            elif (task.content_hash, task.environment_id) == (
                values["content_hash"],
                values["environment"].pk,
            ):
                report.unchanged += 1
            else:
                Task.objects.filter(pk=task.pk).update(**values)
                report.changed += 1


def _values(record: TaskRecord, environment: Environment) -> dict[str, Any]:
    return {
        "environment": environment,
        "instruction": record.instruction,
        "payload": {
            "setup": record.setup or "",
            "files": encode_files(record.files),
            "agent_timeout_seconds": record.agent_timeout_seconds,
            "verifier_timeout_seconds": record.verifier_timeout_seconds,
            **({"messages": list(record.messages)} if record.messages else {}),
        },
        "hidden": {
            "tests": encode_files(record.tests),
            "solution": encode_files(record.solution),
            "evaluator": record.evaluator,
            "evaluator_settings": dict(record.evaluator_settings),
            "evaluator_payload": dict(record.evaluator_payload),
        },
        "metadata": dict(record.metadata),
        "content_hash": record.content_hash,
    }
