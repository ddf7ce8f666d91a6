"""Pacing: nothing starts that would be too old when the trainer gets it."""

from typing import Any

import pytest

from rollouts.feed_options import FeedSettings
from rollouts.models import Experiment, Group, Policy
from rollouts.services.batches import acknowledge_batch, return_batch
from rollouts.services.pacing import Standing, describe, limit_of, note_demand, room_for
from rollouts.states import GroupState
from tests import factories
from tests.services.feeding import detail, feed, finish, lease, make_fed, make_tasks, open_groups

FOUR = FeedSettings(batch_groups=4)


def at(coming: int, **facts: Any) -> Standing:
    return Standing(**{"version": 3, "coming": coming, **facts})


@pytest.mark.parametrize(
    ("lag", "standing", "limit"),
    [
        (None, at(0), None),
        (0, at(0), 4),
        (0, at(0, update_to=4), 0),
        (1, at(0, update_to=4), 8),
        (1, at(0), 8),
        (4, at(0), 20),
        # The batch of this version is out: the next one is leased after an update.
        (0, at(0, taken=4), 0),
        (1, at(0, taken=4), 4),
        # Out in parts: while the trainer's other ranks ask, the rest is expected at this version.
        (0, at(0, taken=1, asked=True), 3),
        (0, at(0, taken=1), 0),
        (1, at(0, taken=5, asked=True), 7),
        # It asks again without having raised the version.
        (0, at(0, taken=4, asked=True), 4),
        (1, at(0, taken=8, asked=True), 8),
        # Versions rise by ten at a time.
        (9, at(0, step=10), 4),
        (10, at(0, step=10), 8),
        (25, at(0, step=10, taken=4), 8),
    ],
)
def test_the_bound_on_lag_bounds_what_is_coming(
    lag: int | None, standing: Standing, limit: int | None
) -> None:
    assert limit_of(lag=lag, settings=FOUR, standing=standing) == limit


@pytest.mark.parametrize(
    ("lag", "settings", "standing", "room"),
    [
        (None, FOUR, at(0), 8),
        (None, FOUR, at(9), 0),
        (0, FOUR, at(0), 4),
        (1, FOUR, at(3, taken=4), 1),
        (1, FOUR, at(8, taken=4), 0),
        (9, FOUR, at(0), 8),
        (9, FeedSettings(batch_groups=4, groups_in_flight=30), at(0), 30),
        (1, FeedSettings(batch_groups=4, groups_in_flight=30), at(0), 8),
        # More may be open than the batch takes where what is left over is cancelled with it.
        (0, FeedSettings(batch_groups=4, groups_in_flight=10), at(0, cancels=True), 10),
        (0, FeedSettings(batch_groups=4, groups_in_flight=10), at(1, cancels=True, taken=4), 0),
        (None, FOUR, at(4, cancels=True, batch_ready=True), 0),
    ],
)
def test_room_is_what_is_missing_of_the_smaller_bound(
    lag: int | None, settings: FeedSettings, standing: Standing, room: int
) -> None:
    assert room_for(lag=lag, settings=settings, standing=standing) == room


@pytest.mark.parametrize(
    ("lag", "standing", "words"),
    [
        (None, at(8), "keeps 8 groups in flight"),
        (1, at(8), "keeps 8 groups in flight"),
        (
            1,
            at(4, taken=4),
            "waits for policy version 4: a group started now would be 1 version too old",
        ),
        (
            1,
            at(12, taken=4),
            "waits for policy version 6: a group started now would be 3 versions too old",
        ),
        (
            9,
            at(4, step=10),
            "waits for policy version 13: a group started now would be 1 version too old",
        ),
        (
            0,
            at(0, update_to=4),
            "waits for the end of the policy's update to version 4: at lag 0 groups start after it",
        ),
        (
            0,
            at(4, cancels=True, batch_ready=True),
            "a batch is ready: what started now would be cancelled when it is leased",
        ),
    ],
)
def test_what_is_waited_for_is_said(lag: int | None, standing: Standing, words: str) -> None:
    assert describe(lag=lag, settings=FOUR, standing=standing) == words


def raise_version(experiment: Experiment) -> None:
    policy = Policy.objects.get(pk=experiment.policy_id)
    Policy.objects.filter(pk=policy.pk).update(version=policy.version + 1)


def finish_all(experiment: Experiment) -> None:
    version = Policy.objects.get(pk=experiment.policy_id).version
    for group in open_groups(experiment):
        finish(group, version=version)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_trainer_that_goes_step_by_step_never_gets_what_is_too_old(lag: int) -> None:
    mode = {"max_policy_lag": lag}
    experiment = make_fed(make_tasks(40, name="a"), batch_groups=2, **mode)
    lags = []

    for _step in range(5):
        feed(experiment)
        finish_all(experiment)
        batch = lease(experiment, 2)
        assert batch is not None
        lags.append(batch.max_lag)
        feed(experiment)
        acknowledge_batch(batch_id=batch.pk)
        raise_version(experiment)

    assert max(lags) == min(lag, 1)  # two batches in flight are as far as it fills
    assert Group.objects.filter(experiment=experiment, state=GroupState.FILTERED).count() == 0


@pytest.mark.django_db(transaction=True)
def test_at_lag_zero_nothing_starts_between_the_lease_and_the_new_version() -> None:
    experiment = make_fed(make_tasks(40, name="a"), batch_groups=2, mode="synchronous")
    assert len(feed(experiment)) == 2
    finish_all(experiment)

    assert feed(experiment) == []
    assert detail(experiment).startswith("a batch is ready")
    batch = lease(experiment, 2)
    assert batch is not None
    assert feed(experiment) == []
    acknowledge_batch(batch_id=batch.pk)
    assert feed(experiment) == []
    assert detail(experiment).startswith("waits for policy version 4")
    update = factories.make_policy_update(policy=experiment.policy)
    assert feed(experiment) == []
    assert detail(experiment).startswith("waits for the end of the policy's update to version 4")
    update.delete()
    raise_version(experiment)
    assert len(feed(experiment)) == 2


@pytest.mark.django_db(transaction=True)
def test_a_trainer_that_asks_again_at_the_same_version_gets_another_batch() -> None:
    experiment = make_fed(make_tasks(40, name="a"), batch_groups=2, mode="synchronous")
    feed(experiment)
    finish_all(experiment)
    first = lease(experiment, 2)
    assert first is not None
    assert feed(experiment) == []

    assert lease(experiment, 2) is None  # not acknowledged yet, as where gradients accumulate
    assert len(feed(experiment)) == 2
    finish_all(experiment)
    assert lease(experiment, 2) is not None
    assert feed(experiment) == []


@pytest.mark.django_db(transaction=True)
def test_ranks_of_one_trainer_share_the_batch_of_a_version() -> None:
    experiment = make_fed(make_tasks(40, name="a"), batch_groups=2, mode="synchronous")
    feed(experiment)
    finish_all(experiment)

    ranks = [lease(experiment, 1), lease(experiment, 1)]

    assert None not in ranks
    assert feed(experiment) == []


@pytest.mark.django_db(transaction=True)
def test_a_batch_that_was_given_back_makes_no_room_and_takes_none() -> None:
    experiment = make_fed(make_tasks(40, name="a"), batch_groups=2, max_policy_lag=1)
    feed(experiment)
    finish_all(experiment)
    batch = lease(experiment, 2)
    assert batch is not None
    return_batch(batch_id=batch.pk)

    assert feed(experiment) == []
    assert Group.objects.filter(experiment=experiment).coming().count() == 4


@pytest.mark.django_db(transaction=True)
def test_a_demand_of_a_pushing_experiment_is_not_noted() -> None:
    experiment = factories.make_experiment()

    note_demand(experiment_id=experiment.pk, version=3)

    experiment.refresh_from_db()
    assert (experiment.demand_version, experiment.demand_at) == (None, None)
