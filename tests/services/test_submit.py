"""Submitting, changing and stopping experiments."""

import uuid

import pytest

from rollouts.exceptions import InvalidValue, StateConflict, UnknownReference
from rollouts.models import Experiment, Group, Rollout
from rollouts.services.cancel import stop_experiment
from rollouts.services.dispatch import dispatch
from rollouts.services.experiments import update_experiment
from rollouts.services.submit import GroupRequest, submit_groups
from tests.services.line import make_experiment, make_group, make_node, make_task

pytestmark = pytest.mark.django_db(transaction=True)


def test_groups_get_their_rollouts_in_order() -> None:
    experiment = make_experiment(priority=2)
    with_sandbox, plain = make_task(ref="a"), make_task(ref="b", sandbox=False)

    groups = submit_groups(
        experiment=experiment,
        requests=[
            GroupRequest(task=with_sandbox.pk, samples=3, priority=1),
            GroupRequest(task=plain.pk, samples=2),
        ],
    )

    rows = Rollout.objects.order_by("sequence", "sample").values_list(
        "group_id", "sample", "priority", "needs_sandbox", "state", "rewards", "outcome"
    )
    first, second = (group.pk for group in groups)
    assert list(rows) == [
        (first, 0, 3, True, "queued", {}, None),
        (first, 1, 3, True, "queued", {}, None),
        (first, 2, 3, True, "queued", {}, None),
        (second, 0, 2, False, "queued", {}, None),
        (second, 1, 2, False, "queued", {}, None),
    ]
    assert Rollout.objects.values("pk").distinct().count() == 5


@pytest.mark.parametrize("samples", [0, -1, 1025, 10_000_000])
def test_impossible_sample_numbers_are_refused_and_nothing_is_written(samples: int) -> None:
    task = make_task()

    with pytest.raises(InvalidValue, match=r"groups\[1\]: samples must be between 1 and 1024"):
        submit_groups(
            experiment=make_experiment(),
            requests=[GroupRequest(task=task.pk), GroupRequest(task=task.pk, samples=samples)],
        )

    assert (Group.objects.count(), Rollout.objects.count()) == (0, 0)


def test_unknown_tasks_are_named_and_nothing_is_written() -> None:
    task = make_task()
    unknown = uuid.uuid4()

    with pytest.raises(UnknownReference, match=f"no task {unknown}"):
        submit_groups(
            experiment=make_experiment(),
            requests=[GroupRequest(task=task.pk), GroupRequest(task=unknown)],
        )

    assert Group.objects.count() == 0


def test_too_many_rollouts_in_one_call_are_refused() -> None:
    task = make_task()

    with pytest.raises(InvalidValue, match="send at most 100000"):
        submit_groups(
            experiment=make_experiment(),
            requests=[GroupRequest(task=task.pk, samples=1000)] * 101,
        )


def test_a_changed_priority_holds_for_what_waits_but_not_for_what_runs() -> None:
    make_node(capacity=1)
    experiment = make_experiment(priority=1)
    make_group(experiment=experiment, samples=2, priority=5)
    dispatch()

    update_experiment(experiment_id=experiment.pk, priority=10)

    assert dict(Rollout.objects.values_list("state", "priority")) == {"init": 6, "queued": 15}


def test_stopping_ends_what_waits_and_flags_what_runs() -> None:
    make_node(capacity=1)
    experiment, other = make_experiment(), make_experiment()
    task = make_task()
    group = make_group(experiment=experiment, task=task, samples=4)
    kept = make_group(experiment=other, task=task)
    dispatch()

    assert stop_experiment(experiment_id=experiment.pk) == 4

    assert set(Rollout.objects.filter(group=group).values_list("state", "outcome")) == {
        ("done", "cancelled")
    }
    group.refresh_from_db()
    assert (group.state, group.done_count) == ("cancelled", 4)
    assert Rollout.objects.get(group=kept).state == "queued"
    with pytest.raises(StateConflict):
        submit_groups(
            experiment=Experiment.objects.get(pk=experiment.pk),
            requests=[GroupRequest(task=task.pk)],
        )
