"""Feeding: what is drawn, in which order, how much, and what the feed says when it waits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from rollouts.models import Experiment, FeedPlan, FeedReturn, Group, Rollout, Task, TaskProgress
from rollouts.services.cancel import stop_experiment
from rollouts.services.experiments import set_experiment_state, update_experiment
from rollouts.services.feed import feed_all, feed_experiment, is_exhausted
from rollouts.services.feed_returns import return_tasks
from rollouts.states import GroupState
from tests import factories
from tests.services.feeding import (
    detail,
    feed,
    finish,
    lease,
    make_fed,
    make_tasks,
    open_groups,
    refs_of,
)

pytestmark = pytest.mark.django_db(transaction=True)


def test_enough_for_two_batches_is_kept_in_flight_and_nothing_is_drawn_twice() -> None:
    experiment = make_fed(make_tasks(20, name="a"), group_size=3)

    first, again = feed(experiment), feed(experiment)

    assert (len(first), again) == (8, [])
    assert detail(experiment) == "keeps 8 groups in flight"
    groups = Group.objects.filter(experiment=experiment).order_by("sequence")
    assert [(group.epoch, group.position) for group in groups] == [(0, at) for at in range(8)]
    assert {group.size for group in groups} == {3}
    assert Rollout.objects.filter(experiment=experiment, state="queued").count() == 24
    assert (experiment.feed_epoch, experiment.feed_position) == (0, 8)


def test_one_that_is_filtered_out_is_replaced_at_once_by_the_next() -> None:
    experiment = make_fed(make_tasks(20, name="a"), filters=[{"rule": "all_wrong"}])
    feed(experiment)
    wrong = finish(open_groups(experiment)[0], rewards=[0.0])

    refs = feed(experiment)

    assert (wrong.state, wrong.filter_rule) == ("filtered", "all_wrong")
    assert len(refs) == 1
    assert Group.objects.get(task__ref=refs[0]).position == 8
    assert Group.objects.filter(experiment=experiment).coming().count() == 8
    assert FeedReturn.objects.count() == 0


def test_the_same_seed_gives_the_same_groups_and_each_epoch_has_an_order_of_its_own() -> None:
    tasks = make_tasks(6, name="a")
    one, same, other = (
        make_fed(tasks, feed_settings={"groups_in_flight": 18, "seed": seed}) for seed in (1, 1, 2)
    )

    drawn = feed(one)

    assert feed(same) == drawn
    assert feed(other) != drawn
    epochs = [drawn[at : at + 6] for at in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [[f"a-00{number}" for number in range(6)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (one.feed_epoch, one.feed_position, FeedPlan.objects.count()) == (3, 0, 0)


def test_what_returned_is_drawn_first_at_its_old_place() -> None:
    experiment = make_fed(
        make_tasks(20, name="a"), feed_settings={"shuffle": False, "groups_in_flight": 4}
    )
    feed(experiment)
    third, second = open_groups(experiment)[2], open_groups(experiment)[1]
    Group.objects.filter(pk__in=[third.pk, second.pk]).update(state=GroupState.CANCELLED)
    assert return_tasks(groups=[third.pk, second.pk], reason="cancelled") == 2
    assert return_tasks(groups=[third.pk], reason="cancelled") in (0, 1)

    refs = feed(experiment)

    assert refs == ["a-001", "a-002"]
    places = [(group.epoch, group.position) for group in open_groups(experiment)]
    assert places == [(0, 0), (0, 3), (0, 1), (0, 2)]
    assert FeedReturn.objects.count() == 0


def test_epochs_end_and_what_returns_afterwards_is_still_drawn() -> None:
    experiment = make_fed(make_tasks(3, name="a"), feed_settings={"epochs": 2})

    assert len(feed(experiment)) == 6
    assert detail(experiment) == "epoch 2 of 2 is used up"
    assert is_exhausted(experiment)
    last = open_groups(experiment)[-1]
    Group.objects.filter(pk=last.pk).update(state=GroupState.CANCELLED)
    return_tasks(groups=[last.pk], reason="cancelled")
    assert not is_exhausted(experiment)
    assert feed(experiment) == [last.task.ref]
    assert is_exhausted(experiment)
    assert feed(experiment) == []
    assert FeedPlan.objects.count() == 0


def test_more_epochs_wake_a_feed_that_was_used_up() -> None:
    experiment = make_fed(make_tasks(2, name="a"), feed_settings={"epochs": 1})
    feed(experiment)

    update_experiment(experiment_id=experiment.pk, feed_settings={"epochs": 2})
    experiment.refresh_from_db()

    assert not is_exhausted(experiment)
    assert len(feed(experiment)) == 2


def test_weights_make_the_tasks_of_a_set_come_more_often() -> None:
    many, few = make_tasks(4, name="many"), make_tasks(2, name="few")
    experiment = make_fed(
        many, few, feed_settings={"weights": {"few": 2}, "epochs": 1, "groups_in_flight": 100}
    )

    refs = feed(experiment)

    assert sorted(refs) == sorted([f"many-00{n}" for n in range(4)] + 2 * ["few-000", "few-001"])


def test_skipped_tasks_are_left_out_of_the_plan_and_of_a_plan_that_is_there() -> None:
    tasks = make_tasks(5, name="a")
    by_id = str(Task.objects.get(ref="a-003").pk)
    experiment = make_fed(
        tasks,
        batch_groups=1,
        feed_settings={"skip": ["a-001", by_id], "shuffle": False, "groups_in_flight": 1},
    )
    assert feed(experiment) == ["a-000"]

    update_experiment(
        experiment_id=experiment.pk, feed_settings={"skip": ["a-002"], "groups_in_flight": 5}
    )

    assert FeedPlan.objects.get().size == 3
    assert feed(experiment) == ["a-004", "a-000", "a-001", "a-003"]


def test_the_curriculum_leaves_out_what_is_too_easy_or_too_hard_and_looks_again_later() -> None:
    tasks = make_tasks(4, name="a")
    curriculum = {"low": 0.2, "high": 0.8, "min_samples": 4, "revisit_epochs": 2}
    experiment = make_fed(
        tasks,
        feed_settings={"curriculum": curriculum, "groups_in_flight": 100, "epochs": 1},
    )
    for ref, right, samples in (("a-000", 4, 4), ("a-001", 0, 8), ("a-002", 3, 3), ("a-003", 2, 4)):
        TaskProgress.objects.create(
            experiment=experiment,
            task=Task.objects.get(ref=ref),
            groups=1,
            samples=samples,
            right=right,
            last_epoch=0,
        )

    drawn = []
    for epochs in (1, 2, 3):
        update_experiment(experiment_id=experiment.pk, feed_settings={"epochs": epochs})
        drawn.append(sorted(feed(experiment)))

    assert drawn[0] == drawn[1] == ["a-002", "a-003"]
    assert drawn[2] == ["a-000", "a-001", "a-002", "a-003"]


def test_a_curriculum_that_leaves_nothing_goes_on_where_it_looks_again() -> None:
    experiment = make_fed(
        make_tasks(1, name="a"),
        batch_groups=1,
        feed_settings={"curriculum": {"high": 0.5, "min_samples": 1, "revisit_epochs": 1000}},
    )
    feed(experiment)
    for group in open_groups(experiment):
        finish(group)
    progress = TaskProgress.objects.get()
    assert (progress.groups, progress.samples, progress.right) == (2, 2, 2)
    assert lease(experiment, 1) is not None

    assert feed(experiment) == ["a-000"]
    assert open_groups(experiment)[0].epoch == 1 + 1000


def test_progress_is_counted_by_the_key_of_the_first_filter_and_nulls_are_no_samples() -> None:
    experiment = make_fed(
        make_tasks(1, name="a"),
        batch_groups=1,
        group_size=3,
        filters=[{"rule": "all_wrong", "key": "exact", "threshold": 0.5}],
        feed_settings={"groups_in_flight": 1},
    )
    feed(experiment)
    (group,) = open_groups(experiment)
    finish(group, rewards=[0.5, 0.25, 1.0])

    progress = TaskProgress.objects.get()
    assert (progress.groups, progress.samples, progress.right) == (1, 3, 2)
    assert (progress.task, progress.last_epoch) == (group.task, 0)


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_a_paused_or_stopped_experiment_is_not_fed(state: str) -> None:
    experiment = make_fed(make_tasks(4, name="a"))
    if state == "paused":
        set_experiment_state(experiment_id=experiment.pk, state="paused")
    else:
        stop_experiment(experiment_id=experiment.pk)

    assert feed(experiment) == []
    assert feed_all() == 0
    assert FeedPlan.objects.count() == 0


def test_an_experiment_without_tasks_says_so_and_begins_when_they_come() -> None:
    tasks = make_tasks(0, name="empty")
    experiment = make_fed(tasks)

    assert feed(experiment) == []
    assert detail(experiment) == "waits for tasks: there are none in empty"
    assert not is_exhausted(experiment)
    factories.make_task(task_set=tasks, ref="late")
    assert feed(experiment)[0] == "late"


def test_a_skip_list_of_everything_says_so() -> None:
    experiment = make_fed(make_tasks(2, name="a"), feed_settings={"skip": ["a-000", "a-001"]})

    assert feed(experiment) == []
    assert detail(experiment) == "waits for tasks: what is skipped leaves none of a"
    assert (experiment.feed_epoch, experiment.feed_position) == (0, 0)


def test_tasks_that_are_deleted_or_whose_set_is_taken_away_are_passed_over() -> None:
    stays, goes = make_tasks(3, name="stays"), make_tasks(3, name="goes")
    experiment = make_fed(
        stays, goes, batch_groups=1, feed_settings={"groups_in_flight": 1, "epochs": 1}
    )
    first = feed(experiment)
    Task.objects.filter(ref="stays-001").exclude(ref__in=first).delete()

    update_experiment(
        experiment_id=experiment.pk, task_sets=[stays], feed_settings={"groups_in_flight": 9}
    )

    expected = {f"stays-00{number}" for number in range(3)} - {"stays-001"} - set(first)
    assert set(feed(experiment)) == expected
    assert detail(experiment) == "epoch 1 of 1 is used up"


def test_a_task_that_was_imported_anew_into_another_environment_is_drawn_in_that_one() -> None:
    tasks = make_tasks(1, name="a")
    experiment = make_fed(tasks, batch_groups=1)
    other = factories.make_environment()
    Task.objects.update(environment=other)

    feed(experiment)

    assert {group.environment for group in open_groups(experiment)} == {other}


def test_a_changed_group_size_holds_for_groups_that_have_not_started() -> None:
    experiment = make_fed(make_tasks(9, name="a"), group_size=2, feed_settings={"shuffle": False})
    feed(experiment)
    started = open_groups(experiment)[0]
    Group.objects.filter(pk=started.pk).update(started_at=started.created_at)

    update_experiment(experiment_id=experiment.pk, group_size=5)
    refs = feed(experiment)

    groups = open_groups(experiment)
    assert [(group.task.ref, group.size) for group in groups] == [
        ("a-000", 2),
        *((f"a-00{number}", 5) for number in range(1, 8)),
    ]
    assert refs == [f"a-00{number}" for number in range(1, 8)]
    withdrawn = Group.objects.filter(experiment=experiment, state=GroupState.CANCELLED)
    assert withdrawn.count() == 7
    assert Rollout.objects.filter(group__in=withdrawn).exclude(outcome="cancelled").count() == 0


def test_every_feeder_at_once_draws_each_place_once() -> None:
    experiment = make_fed(
        make_tasks(30, name="a"), feed_settings={"groups_in_flight": 90, "epochs": 3}
    )

    def one(_number: int) -> int:
        try:
            return feed_experiment(experiment_id=experiment.pk)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(one, range(4)))

    places = Group.objects.filter(experiment=experiment).values_list("epoch", "position")
    assert sum(counts) == 90
    assert sorted(places) == [(epoch, at) for epoch in range(3) for at in range(30)]


def test_one_experiment_that_cannot_be_fed_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, sound = make_fed(make_tasks(2, name="a")), make_fed(make_tasks(2, name="b"))
    Experiment.objects.filter(pk=broken.pk).update(group_size=0)

    assert feed_all() == 8

    assert Group.objects.filter(experiment=sound).count() == 8
    assert "could not be fed" in caplog.text


def test_two_trainers_on_one_experiment_get_different_groups_in_start_order() -> None:
    experiment = make_fed(make_tasks(20, name="a"))
    feed(experiment)
    for group in open_groups(experiment):
        finish(group)

    first, second = lease(experiment, 4), lease(experiment, 4)

    assert first is not None
    assert second is not None
    all_refs = list(
        Group.objects.filter(experiment=experiment)
        .order_by("sequence")
        .values_list("task__ref", flat=True)
    )
    assert refs_of(first) + refs_of(second) == all_refs


def test_flaky_tasks_are_left_out_where_that_is_asked_of_a_plan_that_is_there_too() -> None:
    tasks = make_tasks(3, name="a")
    for ref in ("a-001", "a-002"):
        task = Task.objects.get(ref=ref)
        # What a verification found of an earlier content says nothing of this one.
        flaky_hash = task.content_hash if ref == "a-001" else "another"
        Task.objects.filter(pk=task.pk).update(flaky_hash=flaky_hash)
    order = {"shuffle": False, "epochs": 1, "groups_in_flight": 9}

    assert feed(make_fed(tasks, feed_settings=order)) == ["a-000", "a-001", "a-002"]
    experiment = make_fed(tasks, feed_settings={**order, "skip_flaky": True})
    assert feed(experiment) == ["a-000", "a-002"]

    later = make_fed(tasks, batch_groups=1, feed_settings={**order, "groups_in_flight": 1})
    assert feed(later) == ["a-000"]
    update_experiment(
        experiment_id=later.pk, feed_settings={"skip_flaky": True, "groups_in_flight": 9}
    )
    assert feed(later) == ["a-002"]
