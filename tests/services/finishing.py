"""Groups whose rollouts end as the line would end them, without the line."""

from typing import Any
from uuid import uuid4

from rollouts.models import Batch, Experiment, Group, Rollout, Trajectory
from rollouts.services.batches import lease_batch
from rollouts.services.end import end_rollout
from rollouts.states import GroupState
from tests import factories


def open_group(experiment: Experiment, *, samples: int = 2, **columns: Any) -> Group:
    """Return an open group with its queued rollouts."""
    group = factories.make_group(experiment=experiment, size=samples, **columns)
    for _sample in range(samples):
        factories.make_rollout(group=group, priority=group.priority)
    return group


def samples_of(group: Group) -> list[Rollout]:
    """Return the rollouts of a group that are not done, by sample."""
    return list(group.rollouts.unfinished().order_by("sample"))


def score(
    rollout: Rollout, reward: float = 1.0, *, version: int | None = None, **values: Any
) -> None:
    """End a rollout with a reward; with a version, its tokens are all of that one."""
    if version is not None:
        versions = {"first_policy_version": version, "last_policy_version": version}
        add_trajectory(rollout, **versions)
    rewards = values.pop("rewards", {})
    assert end_rollout(
        rollout_id=rollout.pk, outcome="scored", reward=reward, rewards=rewards, **values
    )


def add_trajectory(rollout: Rollout, **columns: Any) -> Trajectory:
    """Write what a trajectory's row says; no file is behind it."""
    return Trajectory.objects.create(
        **{
            "rollout": rollout,
            "path": f"{uuid4()}.json",
            "size_bytes": 2,
            "sha256": "0" * 64,
            "segments": 1,
            "prompt_tokens": 1,
            "response_tokens": 1,
            "sampled_tokens": 1,
            "trainable": True,
            **columns,
        }
    )


def fail(rollout: Rollout, outcome: str = "infra_failed") -> None:
    """End a rollout without a score."""
    assert end_rollout(rollout_id=rollout.pk, outcome=outcome, failure_code="run.broken")


def finish(group: Group, *rewards: float, version: int | None = None) -> Group:
    """Score every open sample of a group: 1, 0, 1, 0 … where no rewards are given."""
    for place, rollout in enumerate(samples_of(group)):
        score(rollout, rewards[place] if rewards else float(place % 2 == 0), version=version)
    return now(group)


def now(group: Group) -> Group:
    """Return a group as it is in the database."""
    return Group.objects.get(pk=group.pk)


def lease(experiment: Experiment, groups: int, **values: Any) -> Batch | None:
    """Lease a batch as the experiment's owner."""
    return lease_batch(experiment=experiment, owner=experiment.owner, groups=groups, **values)


def held(batch: Batch | None) -> list[Any]:
    """Return the ids of a batch's groups, in the order in which the trainer gets them."""
    assert batch is not None
    return list(batch.groups.order_by("sequence").values_list("pk", flat=True))


def ids(*groups: Group) -> list[Any]:
    """Return the ids of groups."""
    return [group.pk for group in groups]


def with_state(experiment: Experiment, state: GroupState | str) -> list[Any]:
    """Return the ids of an experiment's groups in a state, in start order."""
    found = Group.objects.filter(experiment=experiment, state=state).order_by("sequence")
    return list(found.values_list("pk", flat=True))
