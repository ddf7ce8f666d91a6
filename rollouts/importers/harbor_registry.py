"""Read a registry of Harbor tasks: a JSON file that lists data sets and where their tasks lie."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected
from rollouts.importers.harbor import read_harbor_task
from rollouts.importers.rows import UnreadableSource

MAX_BYTES = 50_000_000


def is_registry(value: Any) -> bool:
    """Tell whether JSON is a registry: data sets by name, each with its tasks."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and isinstance(each.get("tasks"), list) for each in value)
    )


def read_harbor_registry(path: Path) -> Iterator[TaskRecord | RejectedTask]:
    """Read every task of a registry that lies below the registry's own folder.

    Raises `UnreadableSource` and OSError.
    """
    if path.stat().st_size > MAX_BYTES:
        raise UnreadableSource(f"{path.name} has more than {MAX_BYTES} bytes; split it")
    try:
        registry = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as fault:
        raise UnreadableSource(f"{path.name} is not JSON: {fault}") from fault
    if not is_registry(registry):
        raise UnreadableSource(f"{path.name} is no list of data sets with their tasks")
    root = path.resolve().parent
    for dataset in registry:
        name = str(dataset.get("name", "?"))
        for place, task in enumerate(dataset["tasks"]):
            where = Path(f"{path}:{name}[{place}]")
            try:
                yield read_harbor_task(_folder(task, root))
            except TaskRejected as fault:
                yield RejectedTask(path=where, reason=str(fault), raw=json.dumps(task)[:2000])


def _folder(task: Any, root: Path) -> Path:
    if not isinstance(task, Mapping) or not isinstance(task.get("path"), str):
        raise TaskRejected("an entry needs a 'path'")
    if task.get("git_url"):
        commit = task.get("git_commit_id") or "the commit that you trust"
        raise TaskRejected(
            f"the task lies at {task['git_url']}, and nothing is fetched here: clone that "
            f"repository at {commit}, and import its folder"
        )
    folder: Path = (root / task["path"]).resolve()
    if not folder.is_relative_to(root):
        raise TaskRejected(f"path {task['path']!r} leads out of the registry's folder")
    return folder
