"""What becomes of finished groups, and in which order they leave."""

import heapq
import logging
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rollouts.filters.base import FinishedGroup, GroupFilter
from rollouts.filters.registry import FILTERS
from rollouts.models import Batch, Experiment, FeedReturn, Group, TaskProgress
from rollouts.services.batch_choice import Wish, worth_trying
from rollouts.services.batches import acknowledge_batch
from rollouts.services.cancel import cancel_rollout
from rollouts.services.group_counts import count_groups
from tests import factories
from tests.services.finishing import (
    add_trajectory,
    fail,
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

pytestmark = pytest.mark.django_db

NO_VARIANCE = {"rule": "no_variance", "key": "reward"}


def pulling(**columns: Any) -> Experiment:
    return factories.make_experiment(
        **{"feed": "pull", "feed_settings": {"batch_groups": 2}, **columns}
    )


def returned(experiment: Experiment) -> list[tuple[int, int, str]]:
    found = FeedReturn.objects.filter(experiment=experiment)
    return list(found.values_list("epoch", "position", "reason"))


def test_a_group_is_ready_when_its_last_sample_is_done_and_knows_its_versions() -> None:
    group = open_group(factories.make_experiment())
    first, second = samples_of(group)

    add_trajectory(first, first_policy_version=2, last_policy_version=3)
    score(first)
    assert (now(group).state, now(group).ready_at) == ("open", None)
    add_trajectory(second, first_policy_version=3, last_policy_version=5)
    score(second, 0.0)

    ended = now(group)
    assert (ended.state, ended.done_count) == ("ready", 2)
    assert (ended.oldest_version, ended.newest_version) == (2, 5)
    assert ended.ready_at is not None
    assert (ended.filter_rule, ended.filter_detail) == ("", "")


def test_versions_of_what_is_not_trained_on_do_not_count() -> None:
    group = open_group(factories.make_experiment())
    first, second = samples_of(group)

    add_trajectory(first, first_policy_version=1, last_policy_version=1)
    fail(first)
    score(second)

    assert (now(group).oldest_version, now(group).newest_version) == (None, None)


def test_the_first_rule_that_refuses_names_the_reason() -> None:
    right = {"rule": "all_right", "key": "reward", "threshold": 0.5}
    experiment = factories.make_experiment(filters=[right, NO_VARIANCE])

    both, variance, useful = (open_group(experiment) for _each in range(3))
    finish(both, 1.0, 1.0)
    finish(variance, 0.0, 0.0)
    finish(useful, 1.0, 0.0)

    assert (now(both).state, now(both).filter_rule) == ("filtered", "all_right")
    assert (now(variance).state, now(variance).filter_rule) == ("filtered", "no_variance")
    assert now(variance).filter_detail == "reward is 0 in all 2 samples"
    assert now(variance).ready_at is None
    assert now(useful).state == "ready"
    assert count_groups(experiment=experiment) == {
        "states": {
            **{"open": 0, "ready": 1, "leased": 0, "consumed": 0, "filtered": 2, "cancelled": 0}
        },
        "rules": {"all_right": 1, "no_variance": 1},
    }


def test_what_is_filtered_is_kept_with_its_samples() -> None:
    experiment = factories.make_experiment(filters=[NO_VARIANCE])
    group = open_group(experiment)

    finish(group, 1.0, 1.0, version=3)

    assert list(group.rollouts.values_list("outcome", "reward")) == [("scored", 1.0)] * 2
    assert group.rollouts.filter(trajectory__isnull=False).count() == 2
    assert lease(experiment, 1) is None


def test_a_rule_that_judges_the_task_uses_it_up_and_another_lets_it_return() -> None:
    few = {"rule": "min_complete", "fraction": None, "count": 2}
    experiment = pulling(filters=[few, NO_VARIANCE], selection={"min_complete_fraction": 0.0})
    judged = open_group(experiment, epoch=0, position=4)
    unlucky = open_group(experiment, epoch=0, position=5)

    finish(judged, 1.0, 1.0)
    for sample in samples_of(unlucky):
        fail(sample)

    assert (now(judged).filter_rule, now(unlucky).filter_rule) == ("no_variance", "min_complete")
    assert returned(experiment) == [(0, 5, "min_complete")]


def test_too_few_complete_samples_keep_a_pulled_group_and_return_its_task() -> None:
    experiment = pulling()
    group = open_group(experiment, epoch=1, position=7)
    first, second = samples_of(group)

    score(first)
    fail(second, "timed_out")

    assert (now(group).state, now(group).filter_rule) == ("filtered", "too_few_complete")
    assert now(group).filter_detail == "1 of 2 samples are complete, 2 are needed"
    assert returned(experiment) == [(1, 7, "too_few_complete")]


def test_a_pushed_group_reaches_its_sender_whatever_became_of_its_samples() -> None:
    experiment = factories.make_experiment()
    group = open_group(experiment)

    for sample in samples_of(group):
        fail(sample)

    assert now(group).state == "ready"
    assert held(lease(experiment, 1)) == [group.pk]


def test_a_pushed_group_is_kept_back_where_its_sender_wants_that() -> None:
    experiment = factories.make_experiment(selection={"min_complete_fraction": 0.5})
    half, none = open_group(experiment), open_group(experiment)

    score(samples_of(half)[0])
    fail(samples_of(half)[0])
    for sample in samples_of(none):
        assert cancel_rollout(rollout_id=sample.pk)

    assert (now(half).state, now(none).state) == ("ready", "filtered")
    assert now(none).filter_rule == "too_few_complete"
    assert not FeedReturn.objects.exists()  # nothing was drawn


def test_what_is_too_stale_already_is_filtered_at_its_end() -> None:
    experiment = pulling(max_policy_lag=1)  # the policy is at version 3
    old = open_group(experiment, epoch=0, position=0)
    young = open_group(experiment, epoch=0, position=1)

    finish(old, version=1)
    finish(young, version=2)

    assert (now(old).state, now(old).filter_rule) == ("filtered", "too_stale")
    assert now(old).filter_detail == "its oldest token is 2 policy versions old, 1 are allowed"
    assert now(young).state == "ready"
    assert returned(experiment) == [(0, 0, "too_stale")]


def test_progress_is_kept_of_every_group_that_was_judged() -> None:
    experiment = pulling(filters=[NO_VARIANCE])
    task = factories.make_task()
    for rewards in ((1.0, 1.0), (1.0, 0.5)):
        finish(open_group(experiment, task=task, epoch=0, position=0), *rewards)

    progress = TaskProgress.objects.get(experiment=experiment, task=task)
    assert (progress.groups, progress.samples, progress.right) == (2, 4, 3)


@dataclass(frozen=True)
class Failing(GroupFilter):
    """A rule with a mistake in it."""

    name: ClassVar[str] = "failing"
    description: ClassVar[str] = "raises"

    def refuse(self, group: FinishedGroup) -> str | None:
        """Raise."""
        raise KeyError(f"no\0pe of {group.size}")


@dataclass(frozen=True)
class OddTasks(GroupFilter):
    """Refuse tasks by what a trainer wrote beside them."""

    name: ClassVar[str] = "odd_tasks"
    description: ClassVar[str] = "the group's metadata say that it is odd"
    judges_task: ClassVar[bool] = False

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse what is marked as odd."""
        return f"{group.task_ref} is odd" if group.metadata.get("odd") else None


@pytest.fixture
def plug_ins() -> Any:
    FILTERS.configure([f"{__name__}.Failing", f"{__name__}.OddTasks"])
    yield
    FILTERS.configure([])


@pytest.mark.usefixtures("plug_ins")
def test_a_rule_that_fails_refuses_nothing_and_the_group_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = factories.make_experiment(filters=[{"rule": "failing"}, NO_VARIANCE])
    useful, useless = open_group(experiment), open_group(experiment)

    with caplog.at_level(logging.ERROR, logger="rollouts.services.selection"):
        finish(useful, 1.0, 0.0)
        finish(useless, 1.0, 1.0)

    assert now(useful).state == "ready"
    assert now(useful).filter_detail == "failing failed: KeyError: 'no\\x00pe of 2'"
    assert now(useless).filter_rule == "no_variance"
    assert [record.getMessage() for record in caplog.records] == [
        f"filter failing failed on group {group.pk}" for group in (useful, useless)
    ]


@pytest.mark.usefixtures("plug_ins")
def test_a_rule_of_a_plug_in_is_asked_and_its_task_returns_where_it_says_so() -> None:
    experiment = pulling(filters=[{"rule": "odd_tasks"}])
    odd = open_group(experiment, metadata={"odd": True}, epoch=0, position=0)
    even = open_group(experiment, metadata={}, epoch=0, position=1)

    finish(odd)
    finish(even)

    assert (now(odd).filter_rule, now(odd).filter_detail) == ("odd_tasks", f"{odd.task.ref} is odd")
    assert now(even).state == "ready"
    assert returned(experiment) == [(0, 0, "odd_tasks")]


def test_a_rule_that_this_process_does_not_know_holds_up_nothing() -> None:
    experiment = factories.make_experiment(filters=[{"rule": "gone"}])
    group = open_group(experiment)

    assert finish(group).state == "ready"
    assert now(group).filter_detail.startswith("There is no filter 'gone'")


def test_an_open_group_in_front_is_waited_for_in_start_order() -> None:
    experiment = factories.make_experiment()
    slow, *quick = (open_group(experiment) for _each in range(3))
    for group in quick:
        finish(group)

    assert lease(experiment, 2) is None
    assert not worth_trying(experiment_id=experiment.pk, wish=Wish(groups=2))

    finish(slow)

    assert worth_trying(experiment_id=experiment.pk, wish=Wish(groups=2))
    assert held(lease(experiment, 2)) == ids(slow, quick[0])


def test_a_filtered_or_cancelled_group_in_front_is_not_waited_for() -> None:
    experiment = factories.make_experiment(filters=[NO_VARIANCE])
    dull, cancelled, useful = (open_group(experiment) for _each in range(3))
    Group.objects.filter(pk=cancelled.pk).update(state="cancelled")

    finish(dull, 1.0, 1.0)
    finish(useful)

    assert held(lease(experiment, 1)) == [useful.pk]


def test_first_finished_is_first_leased_where_that_is_chosen() -> None:
    experiment = factories.make_experiment(selection={"order": "finished"})
    first, second, third = (open_group(experiment) for _each in range(3))

    finish(third)
    finish(second)

    assert lease(experiment, 3) is None
    assert held(lease(experiment, 1)) == [third.pk]
    finish(first)
    assert held(lease(experiment, 1)) == [second.pk]


def test_a_higher_priority_leaves_first() -> None:
    experiment = factories.make_experiment()
    usual, urgent = open_group(experiment), open_group(experiment, priority=5)
    finish(usual)

    assert lease(experiment, 1) is None  # the urgent one is in front, and still open
    finish(urgent)
    assert held(lease(experiment, 1)) == [urgent.pk]


def test_groups_less_complete_than_wished_for_are_passed_over_and_stay() -> None:
    experiment = factories.make_experiment()
    half, whole, still_open = (open_group(experiment) for _each in range(3))
    score(samples_of(half)[0])
    fail(samples_of(half)[0])
    finish(whole)

    assert held(lease(experiment, 1, min_complete_fraction=0.51)) == [whole.pk]
    assert lease(experiment, 1, min_complete_fraction=1.0) is None  # the open one may be complete
    finish(still_open)
    assert held(lease(experiment, 1, min_complete_fraction=1.0)) == [still_open.pk]
    assert with_state(experiment, "ready") == [half.pk]
    assert held(lease(experiment, 1, min_complete_fraction=0.5)) == [half.pk]


def test_one_experiment_never_gets_groups_of_another() -> None:
    mine, other = factories.make_experiment(), factories.make_experiment()
    finish(open_group(other))

    assert lease(mine, 1) is None


def lengths_of_batches(order: str) -> tuple[list[int], list[int]]:
    """Return the lengths of the first 48 groups that started, and of the first 48 leased.

    24 are on their way at any time; each takes as long as its episodes are; a trainer takes a batch
    of four as soon as there is one.
    """
    lengths = random.Random(7)
    experiment = factories.make_experiment(selection={"order": order})
    task = factories.make_task()
    started: list[int] = []
    length_of: dict[Any, int] = {}
    under_way: list[tuple[int, int, Group]] = []
    leased: list[int] = []

    def start(clock: int) -> None:
        length = round(lengths.lognormvariate(3, 1)) + 1
        group = open_group(experiment, samples=1, task=task)
        started.append(length)
        length_of[group.pk] = length
        heapq.heappush(under_way, (clock + length, len(started), group))

    for _each in range(24):
        start(0)
    while len(leased) < 48:
        clock, _order, group = heapq.heappop(under_way)
        finish(group)
        start(clock)
        while (batch := lease(experiment, 4)) is not None:
            leased += [length_of[pk] for pk in held(batch)]
            acknowledge_batch(batch_id=batch.pk)
    return started[:48], leased[:48]


def test_first_finished_favours_short_episodes() -> None:
    started, leased = lengths_of_batches("finished")

    assert sum(leased) < 0.75 * sum(started)
    assert max(leased) < max(started)


def test_start_order_favours_none() -> None:
    started, leased = lengths_of_batches("start")

    assert leased == started


def test_batches_are_numbered_and_say_how_old_they_are() -> None:
    experiment = factories.make_experiment()
    for version in (1, 3):
        finish(open_group(experiment), version=version)
    finish(open_group(experiment))

    batches = [lease(experiment, 1) for _each in range(3)]

    numbers = [(batch.number, batch.max_lag, batch.policy_version) for batch in batches if batch]
    assert numbers == [(1, 2, 3), (2, 0, 3), (3, None, 3)]
    assert Batch.objects.count() == 3
