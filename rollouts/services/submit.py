"""Submitting: the groups that trainers push."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q

from rollouts.exceptions import InvalidValue, StateConflict, UnknownReference
from rollouts.models import Experiment, Group, Rollout, Task
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.services.broken import refuse_broken
from rollouts.services.groups import NewGroup, add_groups
from rollouts.services.inline import PREFIX
from rollouts.states import ExperimentState, Purpose
from sandboxes.models import Environment, Snapshot

MAX_GROUPS_PER_CALL = 5000
# What the layers of a sandbox depend on, and what its setups may have noticed.
LAYER_FIELDS = (
    *("image_id", "setup", "files", "secrets", "workdir"),
    *("network", "egress_hosts", "gpu"),
)
MAX_ROLLOUTS_PER_CALL = 100_000


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One task to be sampled: a task's id, or its set and reference."""

    task: UUID | None = None
    task_ref: str | None = None
    samples: int | None = None
    priority: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    snapshot: UUID | None = None


def submit_groups(*, experiment: Experiment, requests: Sequence[GroupRequest]) -> list[Group]:
    """Create the groups and all their rollouts, or nothing at all.

    Raises InvalidValue, UnknownReference, StateConflict; the message names the entry at fault.
    """
    if experiment.state == ExperimentState.STOPPED:
        raise _stopped()
    if experiment.purpose == Purpose.EVALUATION:
        raise StateConflict(
            "An evaluation's groups are made by itself: begin another one.", code="evaluation.fixed"
        )
    if experiment.purpose == Purpose.VERIFICATION:
        raise StateConflict(
            "A verification's groups are made by itself: begin another one.",
            code="verification.fixed",
        )
    if not 1 <= len(requests) <= MAX_GROUPS_PER_CALL:
        raise InvalidValue(
            f"Send between 1 and {MAX_GROUPS_PER_CALL} groups in one call, not {len(requests)}."
        )
    sizes = [_samples(request, experiment, place) for place, request in enumerate(requests)]
    if sum(sizes) > MAX_ROLLOUTS_PER_CALL:
        raise InvalidValue(
            f"{sum(sizes)} rollouts in one call; send at most {MAX_ROLLOUTS_PER_CALL}."
        )
    tasks = _resolve(experiment, requests)
    if not experiment.allow_broken:
        for place, task in enumerate(tasks):
            refuse_broken([task.environment], where=f"groups[{place}]: ")
    with transaction.atomic():
        locked = Experiment.objects.select_for_update(no_key=True).get(pk=experiment.pk)
        if locked.state == ExperimentState.STOPPED:
            raise _stopped()
        _check_snapshots(experiment, requests, tasks)
        groups = add_groups(
            experiment=experiment,
            groups=[
                NewGroup(
                    task=task.pk,
                    environment=task.environment_id,
                    size=size,
                    priority=request.priority,
                    metadata=request.metadata,
                    snapshot=request.snapshot,
                )
                for request, task, size in zip(requests, tasks, sizes, strict=True)
            ],
        )
    return groups


def _check_snapshots(
    experiment: Experiment, requests: Sequence[GroupRequest], tasks: Sequence[Task]
) -> None:
    """Refuse snapshots that are not there, not the owner's, or of another kind of sandbox.

    Locks the others, so that none is deleted before its groups are written.
    """
    wanted = {request.snapshot for request in requests if request.snapshot is not None}
    if not wanted:
        return
    ready = Snapshot.objects.ready().select_related("environment")
    found = ready.select_for_update(no_key=True, of=("self",)).order_by("pk").in_bulk(wanted)
    own = Rollout.objects.filter(
        pk__in=[snapshot.owner for snapshot in found.values()],
        experiment__owner=experiment.owner,
    ).values_list("pk", flat=True)
    own_ids = set(own)
    for place, (request, task) in enumerate(zip(requests, tasks, strict=True)):
        if request.snapshot is None:
            continue
        snapshot = found.get(request.snapshot)
        if snapshot is None or snapshot.owner not in own_ids:
            raise UnknownReference(
                f"groups[{place}]: there is no snapshot {request.snapshot} that is ready.",
                code="snapshot.unknown",
            )
        _check_layers(snapshot.environment, task.environment, place)


def _check_layers(made: Environment, wanted: Environment, place: int) -> None:
    """Refuse an environment whose sandboxes are not those that a snapshot was made in."""
    differing = [name for name in LAYER_FIELDS if getattr(made, name) != getattr(wanted, name)]
    if differing:
        names = ", ".join(name.removesuffix("_id") for name in differing)
        raise InvalidValue(
            f"groups[{place}]: the snapshot was made in {made.ref}, which differs from the task's "
            f"environment {wanted.ref} in {names}; they must be equal."
        )


def _stopped() -> StateConflict:
    return StateConflict("The experiment was stopped; create a new one.", code="experiment.stopped")


def _samples(request: GroupRequest, experiment: Experiment, place: int) -> int:
    samples = experiment.group_size if request.samples is None else request.samples
    if not 1 <= samples <= MAX_SAMPLES:
        raise InvalidValue(
            f"groups[{place}]: samples must be between 1 and {MAX_SAMPLES}, not {samples}."
        )
    return samples


def _resolve(experiment: Experiment, requests: Sequence[GroupRequest]) -> list[Task]:
    """Return the task of each request, in order."""
    # Tasks sent along with another experiment's groups are not for this one.
    foreign = Q(task_set__name__startswith=PREFIX) & ~Q(task_set__name=f"{PREFIX}{experiment.pk}")
    tasks = Task.objects.select_related("environment").defer("environment__files").exclude(foreign)
    by_id = tasks.in_bulk([request.task for request in requests if request.task is not None])
    refs = [request.task_ref for request in requests if request.task_ref is not None]
    by_ref: dict[str, list[Task]] = {}
    for task in tasks.filter(ref__in=refs, task_set__experiments=experiment):
        by_ref.setdefault(task.ref, []).append(task)
    found = []
    for place, request in enumerate(requests):
        if (request.task is None) == (request.task_ref is None):
            raise InvalidValue(f"groups[{place}]: give either task or task_ref.")
        if request.task is not None:
            if request.task not in by_id:
                raise UnknownReference(
                    f"groups[{place}]: there is no task {request.task}.", code="task.unknown"
                )
            found.append(by_id[request.task])
            continue
        named = by_ref.get(request.task_ref or "", [])
        if len(named) != 1:
            problem = "is in several of" if named else "is in none of"
            raise UnknownReference(
                f"groups[{place}]: task_ref {request.task_ref!r} {problem} the experiment's "
                f"task sets; add the set to the experiment, or name the task by its id.",
                code="task.unknown" if not named else "task.ambiguous",
            )
        found.append(named[0])
    return found
