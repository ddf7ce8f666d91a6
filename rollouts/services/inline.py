"""Tasks that a trainer sends along with its groups."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from rollouts.exceptions import UnknownReference
from rollouts.models import Experiment, Task, TaskSet
from sandboxes.models import Environment
from sandboxes.services.catalogue import find_environment

PREFIX = "inline-"


@dataclass(frozen=True, kw_only=True)
class InlineTask:
    """One task as the trainer words it; `environment` is `name` or `name@version`.

    `messages` is the conversation that an agent such as `branch` goes on from.
    """

    environment: str
    instruction: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()


def add_inline_tasks(*, experiment: Experiment, tasks: Sequence[InlineTask]) -> list[Task]:
    """Return a stored task for each, in order; equal tasks are stored once per experiment.

    They live in the task set `inline-<experiment id>`. Raises UnknownReference.
    """
    environments = {ref: _environment(ref) for ref in {task.environment for task in tasks}}
    hashes = [_hash(task, environments[task.environment]) for task in tasks]
    with transaction.atomic():
        task_set, _created = TaskSet.objects.get_or_create(
            name=f"{PREFIX}{experiment.pk}",
            defaults={"description": f"Tasks sent along with groups of {experiment.name}."},
        )
        missing = {
            content: Task(
                task_set=task_set,
                ref=content,
                environment=environments[task.environment],
                instruction=task.instruction,
                payload=_payload(task),
                hidden=dict(task.hidden),
                metadata=dict(task.metadata),
                content_hash=content,
            )
            for content, task in zip(hashes, tasks, strict=True)
        }
        Task.objects.bulk_create(missing.values(), batch_size=500, ignore_conflicts=True)
        stored = {task.ref: task for task in task_set.tasks.filter(ref__in=list(missing))}
    return [stored[content] for content in hashes]


def _environment(ref: str) -> Environment:
    try:
        return find_environment(ref=ref)
    except ValidationError as error:
        raise UnknownReference(" ".join(error.messages), code="environment.unknown") from None


def _payload(task: InlineTask) -> dict[str, Any]:
    given = {"messages": list(task.messages)} if task.messages else {}
    return {**task.payload, **given}


def _hash(task: InlineTask, environment: Environment) -> str:
    content = {**asdict(task), "environment": str(environment.pk)}
    if not task.messages:  # tasks without keep the hash that they were stored with
        del content["messages"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
