"""What is submitted: tasks by reference or id, or sent along, packed into calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prorl_client.calls import encode
from prorl_client.records import TaskRecord

GROUPS_PER_CALL = 1000  # the service takes 5000; smaller calls answer sooner
BYTES_PER_CALL = 8_000_000


@dataclass(frozen=True, kw_only=True)
class InlineTask:
    """A task that the service does not have yet: `hidden` is for the evaluator only."""

    environment: str
    instruction: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the API's form."""
        found: dict[str, Any] = {"environment": self.environment, "instruction": self.instruction}
        for name in ("payload", "hidden", "metadata"):
            if getattr(self, name):
                found[name] = dict(getattr(self, name))
        if self.messages:
            found["messages"] = [dict(each) for each in self.messages]
        return found


Task = str | UUID | TaskRecord | InlineTask | Mapping[str, Any]


def as_entry(task: Task, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of a submission. A text is a task's reference; a UUID or record, its id.

    A mapping is an entry of the API's own form, and goes before the defaults. Raises TypeError.
    """
    if isinstance(task, str):
        named: Mapping[str, Any] = {"task_ref": task}
    elif isinstance(task, UUID):
        named = {"task": str(task)}
    elif isinstance(task, TaskRecord):
        named = {"task": task.id}
    elif isinstance(task, InlineTask):
        named = {"inline": task.as_dict()}
    elif isinstance(task, Mapping):
        inline = task.get("inline")
        named = {**task, "inline": inline.as_dict()} if isinstance(inline, InlineTask) else task
    else:
        raise TypeError(f"{type(task).__name__} names no task")
    return {**{name: each for name, each in defaults.items() if each is not None}, **named}


def packed(entries: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries in lists that one call can carry."""
    pack: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        length = len(encode(entry))
        if pack and (len(pack) == GROUPS_PER_CALL or size + length > BYTES_PER_CALL):
            yield pack
            pack, size = [], 0
        pack.append(entry)
        size += length
    if pack:
        yield pack
