"""Evaluation runs: every task so many times, with fixed seeds, under one policy version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from rollouts.exceptions import InvalidValue
from rollouts.models import EvaluationRun, Experiment, Policy, Task, TaskSet
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.services.experiments import create_experiment
from rollouts.services.feed import feed_experiment
from rollouts.states import Feed, Purpose, RolloutState

MAX_ROLLOUTS = 2_000_000
# So many are made before the call answers; the rest by the control worker, page by page.
AT_ONCE = 2000

# One row for each task of a run: a reward that is null or missing is no value.
_RESULTS = """
SELECT task_set.name, task.id, task.ref,
       count(*) AS samples,
       count(*) FILTER (WHERE sample.state = %(done)s) AS done,
       count(sample.value) AS scored,
       count(*) FILTER (WHERE sample.value >= %(threshold)s) AS reached,
       coalesce(sum(sample.value), 0)::float8 AS total
FROM (
    SELECT group_id, state, CASE
        WHEN outcome IS DISTINCT FROM 'scored' THEN NULL
        WHEN %(key)s = 'reward' THEN reward
        WHEN jsonb_typeof(rewards -> %(key)s) = 'number' THEN (rewards ->> %(key)s)::float8
    END AS value
    FROM rollouts_rollout
    WHERE experiment_id = %(experiment)s AND NOT replaced
) AS sample
JOIN rollouts_group AS own ON own.id = sample.group_id
JOIN rollouts_task AS task ON task.id = own.task_id
JOIN rollouts_taskset AS task_set ON task_set.id = task.task_set_id
GROUP BY task_set.name, task.id, task.ref
ORDER BY task_set.name, task.ref COLLATE "C", task.id
"""
_VERSIONS = """
SELECT min(trajectory.first_policy_version), max(trajectory.last_policy_version)
FROM rollouts_trajectory AS trajectory
JOIN rollouts_rollout AS rollout ON rollout.id = trajectory.rollout_id
WHERE rollout.experiment_id = %(experiment)s
"""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How often a task was solved: `scored` samples have a value, `right` of them reach it."""

    task_set: str
    task: Any
    ref: str
    samples: int
    done: int
    scored: int
    right: int
    total: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: tasks that are drawn, samples that are done, and the versions sampled."""

    state: str
    tasks: int
    first_version: int | None
    last_version: int | None


def begin_evaluation(
    *,
    owner: Any,
    name: str,
    policy: Policy,
    task_sets: Sequence[TaskSet],
    samples_per_task: int = 1,
    seed: int = 0,
    key: str = "reward",
    threshold: float = 1.0,
    sampling: Mapping[str, Any] | None = None,
    budgets: Mapping[str, Any] | None = None,
    allow_broken: bool = False,
) -> EvaluationRun:
    """Have every task of the sets sampled, each sample with a seed of its own.

    Its experiment goes before training. Raises InvalidValue for sets without a task, too many
    rollouts, or a seed that is named twice.
    """
    if not 1 <= samples_per_task <= MAX_SAMPLES:
        raise InvalidValue(
            f"samples_per_task must be between 1 and {MAX_SAMPLES}, not {samples_per_task}."
        )
    if (sampling or {}).get("seed", seed) not in (seed, None):
        raise InvalidValue("Give the seed as `seed`, not in sampling.")
    tasks = Task.objects.filter(task_set__in=task_sets).count()
    if not tasks:
        names = ", ".join(each.name for each in task_sets) or "none"
        raise InvalidValue(f"There is no task in the task sets: {names}.")
    if tasks * samples_per_task > MAX_ROLLOUTS:
        raise InvalidValue(
            f"{tasks} tasks {samples_per_task} times are more than {MAX_ROLLOUTS} rollouts: "
            "evaluate fewer task sets in one run."
        )
    with transaction.atomic():
        experiment = create_experiment(
            owner=owner,
            name=name,
            policy=policy,
            task_sets=task_sets,
            group_size=samples_per_task,
            sampling={**(sampling or {}), "seed": seed},
            budgets=budgets,
            purpose=Purpose.EVALUATION,
            feed=Feed.PULL,
            # All its groups are started, whatever these say; a failed sample is a null.
            feed_settings={"batch_groups": 1, "epochs": 1, "shuffle": False},
            selection={"min_complete_fraction": 0.0},
            allow_broken=allow_broken,
        )
        run = EvaluationRun.objects.create(
            owner=owner,
            experiment=experiment,
            samples_per_task=samples_per_task,
            key=key,
            threshold=threshold,
            policy_version=policy.version,
        )
    if tasks * samples_per_task <= AT_ONCE:
        feed_experiment(experiment_id=experiment.pk)
    return run


def results_of(*, run: EvaluationRun) -> list[TaskResult]:
    """Return what came of each task that was drawn, by task set and reference."""
    values: dict[str, Any] = {
        "experiment": run.experiment_id,
        "key": run.key,
        "threshold": run.threshold,
        "done": RolloutState.DONE.value,
    }
    with connection.cursor() as cursor:
        cursor.execute(_RESULTS, values)
        rows = cursor.fetchall()
    names = ("task_set", "task", "ref", "samples", "done", "scored", "right", "total")
    return [TaskResult(**dict(zip(names, row, strict=True))) for row in rows]


def progress_of(*, run: EvaluationRun, results: Sequence[TaskResult]) -> Progress:
    """Return how far a run is; `results` are its own.

    `starting`: tasks are still drawn; `running`; `done`; or the state of an experiment that was
    paused or stopped.
    """
    experiment = Experiment.objects.get(pk=run.experiment_id)  # it changes while it starts
    unfinished = any(each.done < each.samples for each in results)
    if not unfinished and experiment.feed_epoch:
        state = "done"
    elif experiment.state != "active":
        state = experiment.state
    else:
        state = "running" if experiment.feed_epoch else "starting"
    with connection.cursor() as cursor:
        cursor.execute(_VERSIONS, {"experiment": experiment.pk})
        first, last = cursor.fetchone() or (None, None)
    return Progress(state=state, tasks=len(results), first_version=first, last_version=last)
