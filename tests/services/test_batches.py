"""Leasing, acknowledging, giving back."""

from datetime import timedelta

import pytest
from django.utils import timezone

from rollouts.exceptions import NotThere, StateConflict
from rollouts.models import Batch, Experiment, Group, Rollout
from rollouts.services.batches import acknowledge_batch, extend_batch, lease_batch, return_batch
from tests.services.line import make_experiment, make_group, make_task
from tests.services.race import together

pytestmark = pytest.mark.django_db(transaction=True)


def ready_groups(count: int) -> Experiment:
    experiment, task = make_experiment(), make_task()
    for _number in range(count):
        make_group(experiment=experiment, task=task)
    Rollout.objects.update(state="done", outcome="scored", reward=1.0, done_at=timezone.now())
    Group.objects.update(state="ready", done_count=1)
    return experiment


def lease(experiment: Experiment, groups: int) -> Batch | None:
    return lease_batch(experiment=experiment, owner=experiment.owner, groups=groups)


def test_groups_leave_in_start_order_and_never_twice() -> None:
    experiment = ready_groups(3)
    order = list(Group.objects.order_by("sequence").values_list("pk", flat=True))

    first, second = lease(experiment, 2), lease(experiment, 2)

    assert first is not None
    assert second is None
    assert list(first.groups.values_list("pk", flat=True)) == order[:2]
    assert Group.objects.get(pk=order[2]).state == "ready"


def test_trainers_at_the_same_time_get_different_groups() -> None:
    experiment = ready_groups(8)

    batches = together(*[lambda: lease(experiment, 2)] * 4)

    held = [set(b.groups.values_list("pk", flat=True)) for b in batches if b is not None]
    assert sum(map(len, held)) == len(set().union(*held))


def test_acknowledging_twice_is_the_same_as_once_and_giving_back_after_is_refused() -> None:
    batch = lease(ready_groups(1), 1)
    assert batch is not None

    acknowledge_batch(batch_id=batch.pk)
    acknowledge_batch(batch_id=batch.pk)

    assert Group.objects.get().state == "consumed"
    with pytest.raises(StateConflict) as refused:
        return_batch(batch_id=batch.pk)
    assert refused.value.code == "batch.acknowledged"
    assert Group.objects.get().state == "consumed"


def test_acknowledge_against_give_back_one_wins() -> None:
    batch = lease(ready_groups(1), 1)
    assert batch is not None

    results = together(
        lambda: acknowledge_batch(batch_id=batch.pk), lambda: return_batch(batch_id=batch.pk)
    )

    assert sum(result is None for result in results) == 1
    batch.refresh_from_db()
    group = Group.objects.get()
    expected = {"acknowledged": "consumed", "returned": "ready"}
    assert group.state == expected[batch.state]


def test_a_batch_whose_lease_ended_can_be_neither_acknowledged_nor_extended() -> None:
    batch = lease(ready_groups(1), 1)
    assert batch is not None
    Batch.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=1))

    for call in (acknowledge_batch, return_batch):
        with pytest.raises(StateConflict) as refused:
            call(batch_id=batch.pk)
        assert refused.value.code == "batch.expired"
    with pytest.raises(StateConflict):
        extend_batch(batch_id=batch.pk, seconds=60)
    assert Group.objects.get().state == "leased"


def test_a_returned_group_is_leased_again() -> None:
    experiment = ready_groups(1)
    batch = lease(experiment, 1)
    assert batch is not None

    return_batch(batch_id=batch.pk)
    again = lease(experiment, 1)

    assert again is not None
    assert again.pk != batch.pk


def test_an_unknown_batch_is_not_there() -> None:
    import uuid

    with pytest.raises(NotThere):
        acknowledge_batch(batch_id=uuid.uuid4())
