"""Jobs of the reference system's surface: each is a group of one sample in a trainer's experiment.

A trainer's surface runs while its control experiment is active. Every other experiment of the
surface holds the jobs of one policy with the same sampling and budgets.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Count, Max, Q
from django.db.models.functions import Now
from django.utils import timezone

from rollouts.exceptions import NotThere, RolloutError, StateConflict
from rollouts.models import Attempt, Batch, Experiment, Group, Policy, Rollout
from rollouts.services.cancel import cancel_group
from rollouts.services.experiments import create_experiment, set_experiment_state
from rollouts.services.inline import InlineTask, add_inline_tasks
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.states import (
    AttemptState,
    BatchState,
    ExperimentState,
    GroupState,
    RolloutState,
    ServerState,
    Stage,
)

NAME = "reference surface"
LOCK_SPACE = 7_201_013
KEY = "reference"


class NotRunning(RolloutError):
    """The surface was not started, or was stopped."""

    code = "reference.not_running"
    status = 503


class NoServers(RolloutError):
    """The policy has no inference server."""

    code = "reference.no_servers"
    status = 503


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job as it was submitted, or as it is under way."""

    rollout_id: UUID
    group_id: UUID


def start_surface(*, owner: Any, policy: Policy) -> None:
    """Take jobs from now on. Raises StateConflict when it does so already."""
    with transaction.atomic():
        _lock(owner)
        control = _control(owner)
        if control is None:
            create_experiment(owner=owner, name=NAME, policy=policy, group_size=1)
        elif control.state == ExperimentState.ACTIVE:
            raise StateConflict("Server is already running", code="reference.running")
        else:
            set_experiment_state(experiment_id=control.pk, state=ExperimentState.ACTIVE)


def stop_surface(*, owner: Any) -> int:
    """Take no more jobs and cancel those under way; return how many. Raises NotRunning."""
    with transaction.atomic():
        _lock(owner)
        control = require_running(owner=owner)
        set_experiment_state(experiment_id=control.pk, state=ExperimentState.PAUSED)
    return sum(_cancel(group_id) for group_id in _open_groups(owner).values_list("pk", flat=True))


def is_running(*, owner: Any) -> bool:
    """Tell whether jobs are taken."""
    control = _control(owner)
    return control is not None and control.state == ExperimentState.ACTIVE


def require_running(*, owner: Any) -> Experiment:
    """Return the control experiment. Raises NotRunning."""
    control = _control(owner)
    if control is None or control.state != ExperimentState.ACTIVE:
        raise NotRunning("Server is not running. Please start the server first.")
    return control


def submit_job(
    *,
    owner: Any,
    policy: Policy,
    sampling: Mapping[str, Any],
    budgets: Mapping[str, Any],
    task: InlineTask | UUID,
    job_id: str | None,
) -> Job:
    """Start a job; one of the same id that is under way is joined.

    Raises NotRunning, NoServers, UnknownReference, InvalidValue.
    """
    if not policy.servers.exclude(state=ServerState.REMOVED).exists():
        raise NoServers(
            "No LLM server addresses configured. Please add at least one LLM server address."
        )
    with transaction.atomic():
        _lock(owner)  # stop waits, so no job slips past it
        require_running(owner=owner)
        running = None if job_id is None else _open_groups(owner, job_id).first()
        if running is not None:
            return _job(running)
        experiment = _experiment(owner, policy, sampling, budgets)
        if isinstance(task, InlineTask):
            task = add_inline_tasks(experiment=experiment, tasks=[task])[0].pk
        request = GroupRequest(task=task, samples=1, metadata={KEY: {"job_id": job_id}})
        return _job(submit_groups(experiment=experiment, requests=[request])[0])


def cancel_job(*, owner: Any, job_id: str) -> None:
    """Cancel the job of an id. Raises NotRunning, NotThere."""
    require_running(owner=owner)
    group = _open_groups(owner, job_id).first()
    if group is None:
        raise NotThere(f"Job {job_id} not found", code="reference.no_job")
    _cancel(group.pk)


def give_up_job(*, job: Job) -> None:
    """Cancel a job that nobody waits for any more; one that is done stays so."""
    _cancel(job.group_id)


def deliver_job(*, job: Job) -> Rollout:
    """Return a job's rollout, done, with all that its result is made of. Raises NotThere.

    Its group leaves by a batch of its own, acknowledged at once: it is in no other batch.
    """
    related = ("group__task", "environment", "trajectory", "experiment__policy")
    rollout = Rollout.objects.select_related(*related).filter(pk=job.rollout_id).first()
    if rollout is None:
        raise NotThere("The job was deleted.", code="reference.no_job")
    with transaction.atomic():
        experiment = Experiment.objects.select_for_update(no_key=True).get(pk=rollout.experiment_id)
        ready = Group.objects.select_for_update().filter(pk=job.group_id, state=GroupState.READY)
        if ready.exists():
            last = experiment.batches.aggregate(last=Max("number"))["last"]
            batch = Batch.objects.create(
                experiment=experiment,
                owner=experiment.owner,
                number=(last or 0) + 1,
                state=BatchState.ACKNOWLEDGED,
                group_count=1,
                policy_version=rollout.experiment.policy.version,
                lease_expires_at=timezone.now(),
                closed_at=Now(),
            )
            ready.update(state=GroupState.CONSUMED, batch=batch)
    return rollout


def failed_stage(*, rollout: Rollout) -> str | None:
    """Return the stage of the last try that failed, None when none did."""
    failed = rollout.attempts.filter(state__in=[AttemptState.FAILED, AttemptState.LOST])
    return failed.order_by("-created_at").values_list("stage", flat=True).first()


def surface_status(*, owner: Any) -> dict[str, int]:
    """Return how many jobs wait and run, by stage."""
    experiments = Experiment.objects.filter(owner=owner, name__startswith=NAME)
    states = dict(
        Rollout.objects.unfinished()
        .filter(experiment__in=experiments)
        .order_by()
        .values_list("state")
        .annotate(count=Count("pk"))
    )
    waiting = dict(
        Attempt.objects.queued()
        .filter(rollout__experiment__in=experiments)
        .order_by()
        .values_list("stage")
        .annotate(count=Count("pk"))
    )
    found = {f"{stage}_queue": waiting.get(stage, 0) for stage in Stage.values}
    found["init_queue"] += states.get(RolloutState.QUEUED, 0)
    for stage in Stage.values:
        found[stage] = max(0, states.get(stage, 0) - waiting.get(stage, 0))
        found[f"active_{stage}"] = found[stage]
    return {"jobs": sum(states.values()), "total": sum(states.values()), **found}


def _experiment(
    owner: Any, policy: Policy, sampling: Mapping[str, Any], budgets: Mapping[str, Any]
) -> Experiment:
    kind = json.dumps([str(policy.pk), sampling, budgets], sort_keys=True)
    name = f"{NAME} {hashlib.sha256(kind.encode()).hexdigest()[:16]}"
    usable = Experiment.objects.exclude(state=ExperimentState.STOPPED)
    found = usable.filter(owner=owner, name=name, policy=policy).first()
    if found is None:
        return create_experiment(
            owner=owner,
            name=name,
            policy=policy,
            group_size=1,
            sampling=sampling,
            budgets=budgets,
        )
    return found


def _control(owner: Any) -> Experiment | None:
    usable = Experiment.objects.exclude(state=ExperimentState.STOPPED)
    return usable.filter(owner=owner, name=NAME).first()


def _open_groups(owner: Any, job_id: str | None = None) -> Any:
    groups = Group.objects.filter(
        experiment__in=Experiment.objects.filter(owner=owner, name__startswith=NAME),
        state=GroupState.OPEN,
    )
    return groups if job_id is None else groups.filter(Q(metadata__reference__job_id=job_id))


def _job(group: Group) -> Job:
    return Job(rollout_id=group.rollouts.get(sample=0).pk, group_id=group.pk)


def _cancel(group_id: UUID) -> int:
    try:
        return cancel_group(group_id=group_id)
    except StateConflict:  # done meanwhile
        return 0


def _lock(owner: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [LOCK_SPACE, owner.pk])
