"""Build what a feed draws from, and bring its groups to their ends."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollouts.models import Batch, Experiment, Group, Rollout, TaskSet, Trajectory
from rollouts.services.batches import lease_batch
from rollouts.services.end import end_rollout
from rollouts.services.experiments import create_experiment
from rollouts.services.feed import feed_experiment
from rollouts.states import GroupState, Outcome
from tests import factories
from tests.services.line import stored


def make_tasks(count: int, *, name: str | None = None) -> TaskSet:
    """Return a task set of tasks `<set>-000`, `<set>-001` …, which need no sandbox."""
    task_set = factories.make_task_set(**({"name": name} if name else {}))
    environment = factories.make_environment()
    for number in range(count):
        factories.make_task(
            task_set=task_set, environment=environment, ref=f"{task_set.name}-{number:03}"
        )
    return task_set


def make_fed(*task_sets: TaskSet, batch_groups: int = 4, **values: Any) -> Experiment:
    """Return an experiment that pulls, in groups of one sample."""
    settings = {"batch_groups": batch_groups, **values.pop("feed_settings", {})}
    return create_experiment(
        **{
            "owner": factories.make_user(),
            "name": factories.unique("fed"),
            "policy": factories.make_policy(),
            "task_sets": task_sets,
            "group_size": 1,
            "feed": "pull",
            "feed_settings": settings,
            **values,
        }
    )


def feed(experiment: Experiment) -> list[str]:
    """Feed once; return the references of the tasks that were started, in start order."""
    before = set(Group.objects.filter(experiment=experiment).values_list("pk", flat=True))
    count = feed_experiment(experiment_id=experiment.pk)
    groups = Group.objects.filter(experiment=experiment).exclude(pk__in=before)
    refs = list(groups.order_by("sequence").values_list("task__ref", flat=True))
    assert len(refs) == count
    experiment.refresh_from_db()
    return refs


def detail(experiment: Experiment) -> str:
    """Return what the feed says of itself."""
    return Experiment.objects.get(pk=experiment.pk).feed_detail


def finish(group: Group, *, rewards: Sequence[float] = (1.0,), version: int | None = None) -> Group:
    """End the queued rollouts of a group with these rewards, sampled by a policy version."""
    rollouts = Rollout.objects.filter(group=group, outcome__isnull=True).order_by("sample")
    for rollout, reward in zip(rollouts, rewards, strict=True):
        if version is not None:
            place = replace(stored(), first_policy_version=version, last_policy_version=version)
            Trajectory.objects.create(rollout=rollout, **vars(place))
        assert end_rollout(
            rollout_id=rollout.pk,
            outcome=Outcome.SCORED,
            reward=reward,
            rewards={"exact": reward},
            stop_reason="finished",
        )
    group.refresh_from_db()
    return group


def open_groups(experiment: Experiment) -> list[Group]:
    """Return the open groups in start order."""
    return list(
        Group.objects.filter(experiment=experiment, state=GroupState.OPEN).order_by("sequence")
    )


def lease(experiment: Experiment, groups: int) -> Batch | None:
    """Ask for a batch as its owner."""
    return lease_batch(experiment=experiment, owner=experiment.owner, groups=groups)


def refs_of(batch: Batch) -> list[str]:
    """Return the tasks of a batch's groups in their order."""
    return list(batch.groups.order_by("sequence").values_list("task__ref", flat=True))
