"""Verifications: solve some tasks as their authors did, leave them alone, and see what that earns.

The rollouts go the line's whole way, so what they show is what an experiment would meet.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet, TextField, Value
from django.db.models.functions import MD5, Cast, Concat, Now

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.models import Experiment, Rollout, Task, TaskSet, Verification
from rollouts.models.verification import MAX_REPEATS, MAX_TASKS
from rollouts.services.cancel import stop_experiment
from rollouts.services.experiments import create_experiment
from rollouts.services.groups import NewGroup, add_groups
from rollouts.services.inline import PREFIX
from rollouts.services.solutions import NOOP, ORACLE, ROLE, solution_of
from rollouts.services.verification_report import report_on, verdict_of
from rollouts.states import ExperimentState, Purpose, Verdict, VerificationState
from sandboxes.models import Environment

DEADLINES = (10.0, 86_400.0)  # seconds: the least and the most
HASH = "content_hash"
HELD_AT_ONCE = 20  # tasks whose hidden parts, tests and solution, are in memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chosen:
    """A task that is taken."""

    task: UUID
    content_hash: str
    has_solution: bool


def begin_verification(
    *,
    environment: Environment,
    requested_by: Any,
    task_set: TaskSet | None = None,
    tasks: int = 10,
    repeats: int = 2,
    seed: int = 0,
    threshold: float = 1.0,
    tolerance: float = 0.0,
    deadline_seconds: float = 3600.0,
    budgets: Mapping[str, Any] | None = None,
) -> Verification:
    """Start rollouts that solve tasks of an environment's version and others that do nothing.

    The tasks are those that name this version; where none does, those of the name's other
    versions; with a task set, those of the set, whatever they name. `seed` says which of many.
    Raises InvalidValue, and StateConflict while another verification of the version runs.
    """
    _check(tasks, repeats, threshold, tolerance, deadline_seconds)
    chosen = _chosen(environment, task_set, seed, tasks)
    if not chosen:
        where = f"task set {task_set}" if task_set else f"environment {environment.name}"
        raise InvalidValue(
            f"There is no task of {where}: import some, or name another task_set.",
            code="verification.no_tasks",
        )
    try:
        with transaction.atomic():
            experiment = create_experiment(
                owner=requested_by,
                name=f"verification of {environment.ref}",
                policy=None,
                group_size=repeats,
                budgets=budgets,
                purpose=Purpose.VERIFICATION,
                allow_broken=True,
                # No trainer takes its groups; each that ends asks whether all have.
                selection={"min_complete_fraction": 0.0, "unfinished": "cancel"},
            )
            verification = Verification.objects.create(
                environment=environment,
                task_set=task_set,
                experiment=experiment,
                requested_by=requested_by,
                task_count=len(chosen),
                repeats=repeats,
                seed=seed,
                threshold=threshold,
                tolerance=tolerance,
                deadline_at=Now() + timedelta(seconds=deadline_seconds),
            )
            add_groups(
                experiment=experiment,
                groups=[
                    NewGroup(
                        task=each.task,
                        environment=environment.pk,
                        size=repeats,
                        metadata={ROLE: role, HASH: each.content_hash},
                    )
                    for each in chosen
                    for role in ((ORACLE, NOOP) if each.has_solution else (NOOP,))
                ],
            )
    except IntegrityError as error:
        if "verification_one_running" not in str(error):
            raise
        raise StateConflict(
            f"A verification of {environment.ref} runs already: wait for it or cancel it.",
            code="verification.running",
        ) from None
    verification.refresh_from_db()
    return verification


def advance_verifications(*, experiment_id: UUID | None = None) -> int:
    """End the verifications whose rollouts are all done, or whose time is over; return how many.

    Any number of processes may do it at once: one of them writes an end.
    """
    running = Verification.objects.filter(state=VerificationState.RUNNING)
    if experiment_id is not None:
        running = running.filter(experiment=experiment_id)
    ended = 0
    for pk in list(running.order_by("pk").values_list("pk", flat=True)):
        try:
            ended += _advance(pk)
        except Exception:
            logger.exception("verification %s: the next round tries again", pk)
    if experiment_id is None or ended:
        _stop_ended()
    return ended


def cancel_verification(*, verification_id: UUID) -> Verification:
    """End a verification now, with what it has; its environment stays as it is.

    Raises NotThere, and StateConflict for one that has ended.
    """
    verification = Verification.objects.filter(pk=verification_id).first()
    if verification is None:
        raise NotThere("There is no such verification.")
    if not _end(verification, state=VerificationState.CANCELLED):
        raise StateConflict("The verification has ended already.", code="verification.ended")
    _stop_ended()
    verification.refresh_from_db()
    return verification


def done_of(verification: Verification) -> tuple[int, int]:
    """Return how many of a verification's rollouts are done, and how many there are."""
    rollouts = Rollout.objects.filter(experiment=verification.experiment_id)
    everything = rollouts.count()
    return everything - rollouts.unfinished().count(), everything


def _check(
    tasks: int, repeats: int, threshold: float, tolerance: float, deadline_seconds: float
) -> None:
    bounds = {
        "tasks": (tasks, 1, MAX_TASKS),
        "repeats": (repeats, 1, MAX_REPEATS),
        "threshold": (threshold, -1e9, 1e9),
        "tolerance": (tolerance, 0, 1),
        "deadline_seconds": (deadline_seconds, *DEADLINES),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise InvalidValue(f"{name} must be between {low:g} and {high:g}, not {value}.")


def _chosen(
    environment: Environment, task_set: TaskSet | None, seed: int, count: int
) -> list[_Chosen]:
    """Return the tasks to take; only a few of their hidden parts are in memory at once."""
    tasks = _tasks(environment, task_set, seed).defer("instruction", "payload", "metadata")
    return [
        _Chosen(
            task.pk,
            task.content_hash,
            solution_of(task, environment).fits(has_sandbox=environment.image_id is not None),
        )
        for task in tasks[:count].iterator(chunk_size=HELD_AT_ONCE)
    ]


def _tasks(environment: Environment, task_set: TaskSet | None, seed: int) -> QuerySet[Task]:
    """Return the tasks to take from, in an order that follows from the seed."""
    tasks = Task.objects.order_by(MD5(Concat(Value(f"{seed}:"), Cast("ref", TextField()))), "pk")
    if task_set is not None:
        return tasks.filter(task_set=task_set)
    # What trainers sent along with their own groups is not the catalogue's.
    tasks = tasks.exclude(task_set__name__startswith=PREFIX)
    own = tasks.filter(environment=environment)
    return own if own.exists() else tasks.filter(environment__name=environment.name)


def _advance(pk: UUID) -> int:
    verification = (
        Verification.objects.select_related("environment")
        .alias(now=Now())
        .annotate(left=F("deadline_at") - F("now"))
        .filter(pk=pk, state=VerificationState.RUNNING)
        .first()
    )
    if verification is None:
        return 0
    rollouts = Rollout.objects.filter(experiment=verification.experiment_id)
    is_due = verification.left <= timedelta(0)
    if rollouts.unfinished().exists() and not is_due:
        return 0
    return int(_end(verification, state=VerificationState.DONE))


def _end(verification: Verification, *, state: str) -> bool:
    """Write the end of a running verification and what it found; False when it has ended."""
    report = report_on(verification)
    verdict = verdict_of(report, tolerance=verification.tolerance)
    if state == VerificationState.CANCELLED:
        verdict = Verdict.UNDECIDED
    with transaction.atomic():
        won = Verification.objects.filter(
            pk=verification.pk, state=VerificationState.RUNNING
        ).update(state=state, verdict=verdict, report=report, ended_at=Now())
        if not won:
            return False
        if verdict != Verdict.UNDECIDED:
            Environment.objects.filter(pk=verification.environment_id).update(
                verification=verdict, verified_at=Now()
            )
        for each in report["tasks"]:
            if each["state"] == "flaky":
                _mark_flaky(verification, each)
    logger.info("verification %s of %s: %s", verification.pk, verification.environment_id, verdict)
    return True


def _mark_flaky(verification: Verification, found: dict[str, Any]) -> None:
    """Mark a task, unless its content has changed since the verification began."""
    evidence = {
        "verification": str(verification.pk),
        "environment": str(verification.environment_id),
        "rewards": found["rewards"],
    }
    Task.objects.filter(pk=found["task"], content_hash=found[HASH]).update(
        flaky_hash=found[HASH], flaky_evidence=evidence
    )


def _stop_ended() -> None:
    """Cancel what still runs for verifications that have ended."""
    left = Experiment.objects.filter(purpose=Purpose.VERIFICATION).exclude(
        state=ExperimentState.STOPPED
    )
    ended = left.exclude(verification__state=VerificationState.RUNNING)
    for experiment_id in list(ended.order_by("pk").values_list("pk", flat=True)):
        stop_experiment(experiment_id=experiment_id)
