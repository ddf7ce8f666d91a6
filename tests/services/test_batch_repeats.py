"""A batch that came back is leased again as it was; each group is in one batch at a time."""

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from rollouts.exceptions import StateConflict
from rollouts.models import Batch, Experiment, Group
from rollouts.services.batches import (
    acknowledge_batch,
    expire_batches,
    extend_batch,
    lease_batch,
    return_batch,
)
from rollouts.services.requeue import retry_rollout
from tests import factories
from tests.services.finishing import fail, finish, held, ids, lease, now, open_group, samples_of

pytestmark = pytest.mark.django_db


def lapse(batch: Batch) -> None:
    """Let a lease run out, by the database's clock."""
    Batch.objects.filter(pk=batch.pk).update(lease_expires_at=Now() - timedelta(seconds=1))


def ready(experiment: Experiment, count: int) -> list[Group]:
    return [finish(open_group(experiment)) for _each in range(count)]


def leased(experiment: Experiment, groups: int, **values: Any) -> Batch:
    batch = lease(experiment, groups, **values)
    assert batch is not None
    return batch


@pytest.mark.parametrize("way_back", ["nack", "expiry"])
def test_a_trainer_that_lost_its_batch_gets_the_identical_one(way_back: str) -> None:
    experiment = factories.make_experiment()
    groups = ready(experiment, 4)
    first = leased(experiment, 2)
    if way_back == "nack":
        return_batch(batch_id=first.pk)
    else:
        lapse(first)
        assert expire_batches() == 1

    again = leased(experiment, 2)
    following = leased(experiment, 2)

    assert held(again) == ids(*groups[:2])
    assert (again.repeats_id, again.number) == (first.pk, 2)
    assert held(following) == ids(*groups[2:])
    assert following.repeats_id is None
    first.refresh_from_db()
    assert first.closed_at is not None
    assert first.state == ("returned" if way_back == "nack" else "expired")
    assert not Group.objects.filter(last_batch__isnull=False).exists()


def test_the_identical_batch_goes_before_a_group_in_front_that_is_not_finished() -> None:
    experiment = factories.make_experiment(selection={"order": "finished"})
    slow, *quick = (open_group(experiment) for _each in range(3))
    for group in quick:
        finish(group)
    first = leased(experiment, 2)
    return_batch(batch_id=first.pk)
    Experiment.objects.filter(pk=experiment.pk).update(selection={"order": "start"})

    assert held(leased(experiment, 2)) == ids(*quick)
    assert now(slow).state == "open"


def test_several_batches_that_came_back_repeat_in_their_order() -> None:
    experiment = factories.make_experiment()
    ready(experiment, 4)
    first, second = leased(experiment, 2), leased(experiment, 2)
    return_batch(batch_id=second.pk)
    return_batch(batch_id=first.pk)

    again = [leased(experiment, 2), leased(experiment, 2)]

    assert [batch.repeats_id for batch in again] == [first.pk, second.pk]


def test_a_repeated_batch_that_comes_back_is_repeated_again() -> None:
    experiment = factories.make_experiment()
    groups = ready(experiment, 2)
    for _round in range(3):
        batch = leased(experiment, 2)
        assert held(batch) == ids(*groups)
        return_batch(batch_id=batch.pk)

    last = leased(experiment, 2)

    assert last.repeats is not None
    assert (last.number, last.repeats.number) == (4, 3)


def test_another_size_takes_the_groups_in_start_order_and_the_batch_is_no_longer_whole() -> None:
    experiment = factories.make_experiment()
    groups = ready(experiment, 4)
    first = leased(experiment, 2)
    return_batch(batch_id=first.pk)

    three = leased(experiment, 3)
    one = leased(experiment, 1)

    assert (held(three), three.repeats_id) == (ids(*groups[:3]), None)
    assert (held(one), one.repeats_id) == (ids(groups[3]), None)


def test_a_batch_one_of_whose_groups_is_sampled_again_is_not_whole() -> None:
    experiment = factories.make_experiment()
    broken = open_group(experiment)
    for sample in samples_of(broken):
        fail(sample)
    rest = ready(experiment, 2)
    first = leased(experiment, 2)
    return_batch(batch_id=first.pk)

    retry_rollout(rollout_id=broken.rollouts.earliest("sample").pk)

    assert lease(experiment, 2) is None  # the first is open again, and in front
    finish(broken)
    batch = leased(experiment, 2)
    assert (held(batch), batch.repeats_id) == (ids(broken, rest[0]), None)


def test_a_trainer_that_was_away_for_an_hour_can_do_nothing_with_its_batch() -> None:
    experiment = factories.make_experiment()
    (group,) = ready(experiment, 1)
    batch = leased(experiment, 1)
    Batch.objects.update(lease_expires_at=Now() - timedelta(hours=1))

    for state in ("leased", "expired"):
        for call in (acknowledge_batch, return_batch):
            with pytest.raises(StateConflict) as refused:
                call(batch_id=batch.pk)
            assert refused.value.code == "batch.expired"
        with pytest.raises(StateConflict):
            extend_batch(batch_id=batch.pk, seconds=60)
        batch.refresh_from_db()
        assert batch.state == state
        expire_batches()

    assert expire_batches() == 0
    assert now(group).state == "ready"
    assert held(leased(experiment, 1)) == [group.pk]


def test_an_old_batch_cannot_be_acknowledged_once_its_groups_are_in_another() -> None:
    experiment = factories.make_experiment()
    (group,) = ready(experiment, 1)
    old = leased(experiment, 1)
    lapse(old)
    expire_batches()
    new = leased(experiment, 1)

    with pytest.raises(StateConflict):
        acknowledge_batch(batch_id=old.pk)

    assert (now(group).state, now(group).batch_id) == ("leased", new.pk)
    acknowledge_batch(batch_id=new.pk)
    acknowledge_batch(batch_id=new.pk)
    assert now(group).state == "consumed"


def test_a_longer_lease_outlives_the_round_that_takes_back() -> None:
    experiment = factories.make_experiment()
    ready(experiment, 2)
    kept, lost = leased(experiment, 1), leased(experiment, 1)
    extend_batch(batch_id=kept.pk, seconds=3600)
    lapse(lost)

    assert expire_batches() == 1

    kept.refresh_from_db()
    lost.refresh_from_db()
    assert (kept.state, lost.state) == ("leased", "expired")


def test_the_lease_runs_by_the_database_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web process whose clock is a day off leases for as long as any other."""
    from django.utils import timezone

    real = timezone.now
    experiment = factories.make_experiment()
    ready(experiment, 1)
    monkeypatch.setattr(timezone, "now", lambda: real() + timedelta(days=1))

    batch = leased(experiment, 1)

    assert real() < batch.lease_expires_at < real() + timedelta(hours=1)
    assert expire_batches() == 0
    acknowledge_batch(batch_id=batch.pk)


def test_more_groups_than_a_feed_ever_has_is_an_error_and_not_a_wait() -> None:
    from rollouts.exceptions import InvalidValue

    experiment = factories.make_experiment(
        feed="pull", max_policy_lag=0, feed_settings={"batch_groups": 4, "groups_in_flight": 8}
    )

    with pytest.raises(InvalidValue) as refused:
        lease(experiment, 5)

    assert refused.value.code == "batch.too_large"
    assert "at most 4 groups" in str(refused.value)
    assert lease(experiment, 4) is None  # these may come
    Experiment.objects.filter(pk=experiment.pk).update(max_policy_lag=None)
    assert lease(experiment, 8) is None
    with pytest.raises(InvalidValue):
        lease(experiment, 9)
    ready(experiment, 9)  # whatever made them
    assert len(held(leased(experiment, 9))) == 9


def test_asking_in_vain_is_noted_as_demand_and_a_batch_meets_it() -> None:
    experiment = factories.make_experiment(feed="pull", feed_settings={"batch_groups": 1})

    assert lease(experiment, 1) is None
    experiment.refresh_from_db()
    assert experiment.demand_version == 3

    ready(experiment, 1)
    leased(experiment, 1)
    experiment.refresh_from_db()
    assert experiment.demand_version is None


def test_batches_are_numbered_within_their_experiment() -> None:
    first, second = factories.make_experiment(), factories.make_experiment()
    for experiment in (first, second):
        ready(experiment, 2)

    numbers = [
        lease_batch(experiment=experiment, owner=experiment.owner, groups=1)
        for experiment in (first, second, first, second)
    ]

    assert [batch.number for batch in numbers if batch] == [1, 1, 2, 2]
