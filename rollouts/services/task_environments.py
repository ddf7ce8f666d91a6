"""Environments for imported tasks: what a task asks of its sandbox becomes a catalogue entry."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollouts.importers.base import RejectedTask, TaskRecord
from sandboxes.models import Environment, Image
from sandboxes.services.catalogue import save_environment

DEFAULT_IMAGE = "base"
DEFAULT_WORKDIR = "/app"
CLOSED = (None, "", "no-network", "none")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Need:
    """What a task asks of its sandbox; tasks with equal needs share an environment."""

    image: str
    workdir: str
    memory_mb: int | None
    storage_mb: int | None

    @property
    def digest(self) -> str:
        """Return a short name of this need."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    @property
    def limits(self) -> dict[str, int]:
        """Return the limits as an environment holds them, in bytes."""
        limits = {"memory_bytes": self.memory_mb, "disk_bytes": self.storage_mb}
        return {name: value * MIB for name, value in limits.items() if value}


def refuse_unmet(
    records: Iterable[TaskRecord | RejectedTask],
) -> Iterator[TaskRecord | RejectedTask]:
    """Yield the records; one that asks for what no sandbox here gives comes out rejected."""
    for record in records:
        if isinstance(record, TaskRecord) and (reason := _unmet(record)):
            yield RejectedTask(path=Path(record.ref), reason=reason)
        else:
            yield record


def place_records(
    *, name: str, records: Iterable[TaskRecord | RejectedTask]
) -> tuple[list[TaskRecord | RejectedTask], Callable[[TaskRecord], Environment]]:
    """Return the records, and the environment of each: one per need, made when it is asked for.

    The need that most tasks have is named `name`, the others `name-<digest>`. A record whose
    image is not in the catalogue comes out rejected.
    """
    images = {image.name: image for image in Image.objects.all()}
    placed: list[TaskRecord | RejectedTask] = []
    needs: Counter[Need] = Counter()
    for record in records:
        if isinstance(record, TaskRecord) and _need(record).image not in images:
            reason = (
                f"image {_need(record).image!r} is not in the catalogue; add it there, or import "
                "with an environment that has what the task needs"
            )
            placed.append(RejectedTask(path=Path(record.ref), reason=reason))
            continue
        if isinstance(record, TaskRecord):
            needs[_need(record)] += 1
        placed.append(record)
    most = min(needs, key=lambda need: (-needs[need], need.digest), default=None)
    made: dict[Need, Environment] = {}

    def environment_of(record: TaskRecord) -> Environment:
        need = _need(record)
        if need not in made:
            made[need] = save_environment(
                name=name if need == most else f"{name}-{need.digest}",
                image=images[need.image],
                workdir=need.workdir,
                agent="command_line",
                tools=["bash", "submit"],
                limits=need.limits,
                evaluator="script",
            )
        return made[need]

    return placed, environment_of


def _need(record: TaskRecord) -> Need:
    asked = record.environment
    return Need(
        record.image or DEFAULT_IMAGE,
        str(asked.get("workdir") or DEFAULT_WORKDIR),
        _whole(asked.get("memory_mb")),
        _whole(asked.get("storage_mb")),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _unmet(record: TaskRecord) -> str:
    asked = record.environment
    for name in ("memory_mb", "storage_mb"):
        if asked.get(name) is not None and _whole(asked[name]) is None:
            return f"[environment] {name} is {asked[name]!r}; it must be a whole number above 0"
    for name, table in (("env", "environment"), ("verifier_env", "verifier")):
        if asked.get(name):
            return f"[{table}] env is not given to sandboxes; write it into setup.sh or test.sh"
    if asked.get("network_mode") not in CLOSED or asked.get("allowed_hosts"):
        return "the task asks for a network, and sandboxes have none; remove network_mode"
    return ""
