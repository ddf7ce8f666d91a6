"""Staleness: what is too old when a trainer asks is filtered, counted, and its task returns."""

from typing import Any

import pytest

from rollouts.models import Experiment, FeedReturn, Group, Policy
from rollouts.services.batch_choice import Wish, worth_trying
from rollouts.services.batches import return_batch
from rollouts.services.group_counts import count_groups
from tests import factories
from tests.services.finishing import finish, held, ids, lease, now, open_group

pytestmark = pytest.mark.django_db


def experiment_of(lag: int | None, **columns: Any) -> Experiment:
    """Return an experiment at version 3 that allows such a lag."""
    return factories.make_experiment(max_policy_lag=lag, **columns)


def at_version(experiment: Experiment, version: int) -> None:
    Policy.objects.filter(pk=experiment.policy_id).update(version=version)


def test_lag_is_what_the_policy_has_moved_on_since_the_oldest_token() -> None:
    experiment = experiment_of(2)
    groups = [finish(open_group(experiment), version=version) for version in (3, 2, 1)]
    at_version(experiment, 4)

    batch = lease(experiment, 2)

    assert held(batch) == ids(*groups[:2])
    assert batch is not None
    assert (batch.policy_version, batch.max_lag) == (4, 2)
    dropped = now(groups[2])
    assert (dropped.state, dropped.filter_rule) == ("filtered", "too_stale")
    assert dropped.filter_detail == "its oldest token is 3 policy versions old, 2 are allowed"
    assert count_groups(experiment=experiment)["rules"] == {"too_stale": 1}


def test_a_trainer_may_ask_for_younger_ones_but_not_for_older_ones() -> None:
    experiment = experiment_of(1)
    young, old = (finish(open_group(experiment), version=version) for version in (3, 2))

    assert held(lease(experiment, 1, max_policy_lag=0)) == [young.pk]
    assert now(old).filter_rule == "too_stale"

    too_old = open_group(experiment)
    finish(too_old, version=3)
    at_version(experiment, 5)
    assert lease(experiment, 1, max_policy_lag=100) is None
    assert now(too_old).filter_rule == "too_stale"


def test_without_a_limit_nothing_is_too_old() -> None:
    experiment = experiment_of(None)
    group = finish(open_group(experiment), version=0)
    at_version(experiment, 1000)

    batch = lease(experiment, 1)

    assert held(batch) == [group.pk]
    assert batch is not None
    assert batch.max_lag == 1000


def test_groups_without_a_known_version_are_never_too_old() -> None:
    experiment = experiment_of(0)
    group = finish(open_group(experiment))
    at_version(experiment, 9)

    batch = lease(experiment, 1)

    assert held(batch) == [group.pk]
    assert batch is not None
    assert batch.max_lag is None


def test_a_policy_that_went_back_makes_no_group_older() -> None:
    experiment = experiment_of(0)
    finish(open_group(experiment), version=3)
    at_version(experiment, 1)

    batch = lease(experiment, 1)

    assert batch is not None
    assert batch.max_lag == 0


def test_tasks_of_what_was_too_old_return_to_the_feed_at_their_places() -> None:
    experiment = experiment_of(0, feed="pull", feed_settings={"batch_groups": 1})
    for position in (8, 5):
        finish(open_group(experiment, epoch=2, position=position), version=3)
    at_version(experiment, 4)

    assert lease(experiment, 1) is None

    found = FeedReturn.objects.values_list("epoch", "position", "reason")
    assert list(found) == [(2, 5, "too_stale"), (2, 8, "too_stale")]


def test_an_identical_batch_that_grew_too_old_meanwhile_is_not_given_again() -> None:
    experiment = experiment_of(1)
    old, young = (finish(open_group(experiment), version=version) for version in (2, 3))
    batch = lease(experiment, 2)
    assert batch is not None
    return_batch(batch_id=batch.pk)
    at_version(experiment, 4)

    assert lease(experiment, 2) is None

    assert (now(old).state, now(old).last_batch_id) == ("filtered", None)
    again = lease(experiment, 1)
    assert (held(again), again and again.repeats_id) == ([young.pk], None)


def test_a_wait_notices_what_grew_too_old_and_makes_room() -> None:
    experiment = experiment_of(0)
    stale = finish(open_group(experiment), version=3)
    open_group(experiment)
    wish = Wish(groups=2)
    assert not worth_trying(experiment_id=experiment.pk, wish=wish)

    at_version(experiment, 4)

    assert worth_trying(experiment_id=experiment.pk, wish=wish)
    assert lease(experiment, 2) is None
    assert now(stale).state == "filtered"
    assert not worth_trying(experiment_id=experiment.pk, wish=wish)


def test_groups_that_a_trainer_holds_are_not_taken_from_it() -> None:
    experiment = experiment_of(0)
    group = finish(open_group(experiment), version=3)
    lease(experiment, 1)
    at_version(experiment, 9)

    assert lease(experiment, 1) is None

    assert now(group).state == "leased"
    assert not Group.objects.filter(state="filtered").exists()
