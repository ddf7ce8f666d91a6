"""Early termination: once a batch is full, what can no longer enter it is cancelled."""

from typing import Any

import pytest

from rollouts.models import Experiment, FeedReturn, Group, Rollout
from rollouts.services.cancel import cancel_group, stop_experiment
from rollouts.services.claim import Claim
from rollouts.services.dispatch import dispatch
from rollouts.services.early_end import cancel_leftovers, end_all_early, end_early
from rollouts.services.reap import reap
from tests import factories
from tests.services.finishing import (
    finish,
    held,
    ids,
    lease,
    now,
    open_group,
    samples_of,
    score,
    with_state,
)
from tests.services.line import claim_active, make_node

pytestmark = pytest.mark.django_db


def cancelling(*, order: str = "start", **columns: Any) -> Experiment:
    selection = {"unfinished": "cancel", "order": order}
    return factories.make_experiment(selection=selection, **columns)


def pulling(batch_groups: int, **options: Any) -> Experiment:
    return cancelling(feed="pull", feed_settings={"batch_groups": batch_groups}, **options)


def test_what_stands_behind_a_full_batch_is_cancelled_and_returns() -> None:
    experiment = pulling(2)
    first, second, *behind = (
        open_group(experiment, epoch=0, position=position) for position in range(4)
    )
    score(samples_of(behind[0])[0])
    finish(second)
    assert end_early(experiment_id=experiment.pk) == 0
    finish(first)

    assert end_early(experiment_id=experiment.pk) == 2

    assert with_state(experiment, "cancelled") == ids(*behind)
    returns = FeedReturn.objects.values_list("position", "reason")
    assert list(returns) == [(2, "cancelled"), (3, "cancelled")]
    assert cancel_leftovers(experiment_id=experiment.pk) == 3
    assert not Rollout.objects.unfinished().exists()
    outcomes = behind[0].rollouts.order_by("sample").values_list("outcome", flat=True)
    assert list(outcomes) == ["scored", "cancelled"]  # what was finished is kept
    assert held(lease(experiment, 2)) == ids(first, second)


def test_nothing_is_cancelled_for_being_slow_in_start_order() -> None:
    experiment = pulling(1)
    slow, quick = (open_group(experiment) for _each in range(2))

    finish(quick)

    assert end_early(experiment_id=experiment.pk) == 0
    assert now(slow).state == "open"


def test_the_slow_are_cancelled_where_the_first_finished_go_first() -> None:
    experiment = pulling(1, order="finished")
    slow, quick = (open_group(experiment) for _each in range(2))

    finish(quick)

    assert end_all_early() == 1
    assert now(slow).state == "cancelled"


def test_what_was_pushed_is_cancelled_by_the_lease() -> None:
    experiment = cancelling()
    groups = [open_group(experiment) for _each in range(3)]
    finish(groups[0])
    assert end_all_early() == 0

    batch = lease(experiment, 1)

    assert held(batch) == [groups[0].pk]
    assert with_state(experiment, "cancelled") == ids(*groups[1:])
    assert not FeedReturn.objects.exists()


def test_a_lease_that_gives_nothing_cancels_nothing() -> None:
    experiment = cancelling()
    open_group(experiment)

    assert lease(experiment, 1) is None

    assert Group.objects.get().state == "open"


def test_what_is_carried_over_stays_open() -> None:
    experiment = factories.make_experiment(feed="pull", feed_settings={"batch_groups": 1})
    done, carried = (open_group(experiment) for _each in range(2))
    finish(done)

    assert end_all_early() == 0
    assert lease(experiment, 1) is not None
    assert now(carried).state == "open"


def running(group: Group) -> Claim:
    """Return the claim of a worker that holds the group's only sample."""
    workers = make_node("here")
    assert dispatch() == 1
    return claim_active(samples_of(group)[0], workers["init"])


@pytest.mark.parametrize("state", ["cancelled", "filtered"])
def test_the_reaper_cancels_what_still_runs_in_an_ended_group(state: str) -> None:
    group = open_group(factories.make_experiment(), samples=1)
    running(group)
    Group.objects.update(state=state)

    assert reap().left_running == 1

    assert Rollout.objects.get().cancel_requested_at is not None
    assert reap().left_running == 0


def test_a_group_cancelled_by_hand_does_not_return_to_the_feed() -> None:
    experiment = pulling(1)
    group = open_group(experiment, epoch=0, position=0)

    assert cancel_group(group_id=group.pk) == 2

    assert now(group).state == "cancelled"
    assert not FeedReturn.objects.exists()


def test_stopping_leaves_what_is_ready_for_the_trainer() -> None:
    experiment = factories.make_experiment()
    ready, still_open = (open_group(experiment) for _each in range(2))
    finish(ready)

    stop_experiment(experiment_id=experiment.pk)

    assert now(still_open).state == "cancelled"
    assert held(lease(experiment, 1)) == [ready.pk]
