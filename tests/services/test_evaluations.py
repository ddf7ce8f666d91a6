"""Evaluation runs: what is started, with which seeds, what is told of it, and two compared."""

from typing import Any

import pytest

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import (
    EvaluationRun,
    Experiment,
    FeedReturn,
    Group,
    Rollout,
    TaskSet,
    Trajectory,
)
from rollouts.services import evaluations
from rollouts.services.dispatch import dispatch
from rollouts.services.end import end_rollout
from rollouts.services.evaluation_report import compare_runs, report_of
from rollouts.services.evaluations import begin_evaluation
from rollouts.services.experiments import set_experiment_state, update_experiment
from rollouts.services.feed import feed_all, feed_experiment, is_exhausted
from rollouts.services.rewind import rewind
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.stages.seeding import seed_of
from tests import factories
from tests.services.feeding import make_fed, make_tasks
from tests.services.line import make_node, stored

pytestmark = pytest.mark.django_db(transaction=True)


def begin(*task_sets: TaskSet, **values: Any) -> EvaluationRun:
    return begin_evaluation(
        **{
            "owner": factories.make_user(),
            "name": factories.unique("run"),
            "policy": factories.make_policy(),
            "task_sets": task_sets,
            "samples_per_task": 2,
            **values,
        }
    )


def end(run: EvaluationRun, ref: str, *values: float | None, key: str | None = None) -> None:
    """End a task's samples with these values; None: it failed, or was scored without the key."""
    rollouts = Rollout.objects.filter(experiment=run.experiment_id, group__task__ref=ref)
    for rollout, value in zip(rollouts.order_by("sample"), values, strict=True):
        if value is None and key is None:
            assert end_rollout(rollout_id=rollout.pk, outcome="infra_failed", failure_code="x.y")
            continue
        rewards = {} if value is None else {key or "exact": value}
        assert end_rollout(
            rollout_id=rollout.pk,
            outcome="scored",
            reward=value if key is None else 0.0,
            rewards=rewards,
        )


def test_every_task_is_started_at_once_and_only_once() -> None:
    one, two = make_tasks(3, name="one"), make_tasks(2, name="two")

    run = begin(one, two)

    experiment = Experiment.objects.get()
    assert (experiment.purpose, experiment.group_size, experiment.max_policy_lag) == (
        "evaluation",
        2,
        None,
    )
    refs = Group.objects.order_by("sequence").values_list("task__ref", flat=True)
    assert sorted(refs) == ["one-000", "one-001", "one-002", "two-000", "two-001"]
    assert Rollout.objects.filter(state="queued").count() == 10
    assert is_exhausted(experiment)
    assert (run.policy_version, report_of(run=run).progress.state) == (3, "running")
    assert (feed_all(), feed_experiment(experiment_id=experiment.pk)) == (0, 0)


def test_a_large_run_is_made_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "AT_ONCE", 0)
    monkeypatch.setattr("rollouts.services.feed.GROUPS_PER_STEP", 2)
    run = begin(make_tasks(7, name="a"))
    assert (Group.objects.count(), report_of(run=run).progress.state) == (0, "starting")

    assert feed_all() == 7

    places = Group.objects.order_by("sequence").values_list("task__ref", "position")
    assert list(places) == [(f"a-00{number}", number) for number in range(7)]
    run.refresh_from_db()
    assert report_of(run=run).progress.state == "running"


def test_evaluation_goes_before_training() -> None:
    make_node(capacity=2)
    tasks = make_tasks(2, name="a")
    training = make_fed(tasks, priority=100)
    feed_experiment(experiment_id=training.pk)
    run = begin(tasks, samples_per_task=4)

    assert dispatch() == 8

    started = Rollout.objects.exclude(state="queued")
    assert set(started.values_list("experiment", flat=True)) == {run.experiment_id}


def test_seeds_depend_on_the_seed_the_task_and_the_sample_alone() -> None:
    tasks = make_tasks(2, name="a")
    runs = [begin(tasks, seed=5), begin(make_tasks(1, name="b"), tasks, seed=5)]
    other = begin(tasks, seed=6)

    def seeds(run: EvaluationRun) -> dict[tuple[str, int], int | None]:
        rows = Rollout.objects.filter(experiment=run.experiment_id, group__task__task_set=tasks)
        return {
            (row.group.task.ref, row.sample): seed_of(row, row.experiment.sampling["seed"])
            for row in rows.select_related("experiment", "group__task")
        }

    first = seeds(runs[0])
    assert len(set(first.values())) == 4
    assert seeds(runs[1]) == first
    assert not set(seeds(other).values()) & set(first.values())
    # Kept over releases: a run is to be repeatable after an upgrade.
    assert first["a-000", 0] == 1_276_278_995


def test_no_two_training_samples_draw_the_same_numbers() -> None:
    task = factories.make_task(ref="a")
    places = [
        {},
        {"epoch": 0, "position": 3},
        {"epoch": 0, "position": 4},
        {"epoch": 1, "position": 3},
    ]
    groups = [factories.make_group(task=task, size=2, **place) for place in places]
    rollouts = [factories.make_rollout(group=group) for group in groups for _ in range(2)]

    seeds = [seed_of(rollout, 5) for rollout in rollouts]

    assert len(set(seeds)) == 8
    assert [seed_of(rollout, 5) for rollout in rollouts] == seeds
    assert seed_of(rollouts[0], 5, offset=3) == (int(seeds[0] or 0) + 3) % 2**31
    assert seed_of(rollouts[0], None) is None


def test_what_was_found_is_told_by_task_set_and_over_all() -> None:
    run = begin(make_tasks(2, name="one"), make_tasks(1, name="two"))
    end(run, "one-000", 1.0, 0.0)
    end(run, "one-001", 1.0, 1.0)

    found = report_of(run=run)

    one, two = found.task_sets["one"], found.task_sets["two"]
    assert (one.tasks, one.samples, one.done, one.scored, one.nulls, one.right) == (
        2,
        4,
        4,
        4,
        0,
        3,
    )
    assert (one.pass_at[1].value, one.pass_at[2].value) == (0.75, 1.0)
    assert one.mean_reward.value == 0.75
    assert (two.tasks, two.samples, two.done, two.scored) == (1, 2, 0, 0)
    assert (two.pass_at[1].value, two.pass_at[1].tasks) == (None, 0)
    assert (found.overall.tasks, found.overall.pass_at[1].tasks) == (3, 2)
    assert found.progress.state == "running"
    end(run, "two-000", 0.0, 0.0)
    found = report_of(run=run)
    assert (found.progress.state, found.overall.pass_at[1].value) == ("done", 0.5)
    assert report_of(run=run) == found


def test_failed_samples_are_nulls_and_their_task_is_not_drawn_again() -> None:
    run = begin(make_tasks(2, name="a"), samples_per_task=3)
    end(run, "a-000", 1.0, None, 0.0)
    end(run, "a-001", None, None, None)

    found = report_of(run=run).overall

    assert (found.done, found.scored, found.nulls, found.right) == (6, 2, 4, 1)
    assert [(k, each.value, each.tasks) for k, each in found.pass_at.items()] == [
        (1, 0.5, 1),
        (2, 1.0, 1),
        (3, None, 0),
    ]
    assert report_of(run=run).progress.state == "done"
    assert (FeedReturn.objects.count(), feed_experiment(experiment_id=run.experiment_id)) == (0, 0)


def test_a_named_reward_and_a_threshold_say_what_is_right() -> None:
    run = begin(make_tasks(2, name="a"), key="tests", threshold=0.5)
    end(run, "a-000", 0.5, 0.49, key="tests")
    end(run, "a-001", 0.9, None, key="tests")

    found = report_of(run=run).overall

    assert (found.scored, found.nulls, found.right) == (3, 1, 2)
    assert found.pass_at[1].value == 0.75
    assert found.mean_reward.value == pytest.approx((0.495 + 0.9) / 2)


def test_tokens_of_several_versions_are_told() -> None:
    run = begin(make_tasks(1, name="a"))
    rollouts = list(Rollout.objects.filter(experiment=run.experiment_id).order_by("sample"))
    for rollout, (first, last) in zip(rollouts, [(3, 3), (3, 5)], strict=True):
        place = {**vars(stored()), "first_policy_version": first, "last_policy_version": last}
        Trajectory.objects.create(rollout=rollout, **place)

    progress = report_of(run=run).progress

    assert (progress.first_version, progress.last_version) == (3, 5)


def test_a_run_that_was_paused_or_stopped_says_so() -> None:
    run = begin(make_tasks(1, name="a"))
    set_experiment_state(experiment_id=run.experiment_id, state="paused")

    assert report_of(run=run).progress.state == "paused"


def test_two_runs_are_compared_on_the_tasks_that_both_have() -> None:
    tasks = make_tasks(4, name="a")
    old, new = begin(tasks), begin(tasks, make_tasks(1, name="b"), samples_per_task=4)
    for ref, values in {
        "a-000": (0, 0),
        "a-001": (1, 0),
        "a-002": (1, 1),
        "a-003": (None, None),
    }.items():
        end(old, ref, *values)
    for ref, values in {
        "a-000": (1, 1, 1, 0),
        "a-001": (0, 0, 0, 0),
        "a-002": (1, 1, 1, 1),
    }.items():
        end(new, ref, *values)

    found = compare_runs(run=new, other=old)

    assert (found.tasks, found.left_out, found.complete) == (3, 2, False)
    assert [each.value for each in found.pass_at_1] == [pytest.approx(1.75 / 3), 0.5]
    assert found.paired.difference.value == pytest.approx(0.25 / 3)
    assert (found.paired.wins, found.paired.losses, found.paired.ties) == (1, 1, 1)
    back = compare_runs(run=old, other=new).paired
    assert (back.wins, back.losses, back.p_value) == (1, 1, 1.0)
    assert back.difference.value == pytest.approx(-0.25 / 3)


def test_runs_that_judge_differently_or_share_nothing_are_not_compared() -> None:
    one, two = make_tasks(1, name="a"), make_tasks(1, name="b")
    first, other = begin(one), begin(two)
    end(first, "a-000", 1.0, 1.0)
    end(other, "b-000", 1.0, 1.0)

    with pytest.raises(InvalidValue, match="no task in common"):
        compare_runs(run=first, other=other)
    with pytest.raises(InvalidValue, match=r"by tests from 0\.5 on"):
        compare_runs(run=first, other=begin(one, key="tests", threshold=0.5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"samples_per_task": 0}, "samples_per_task must be between 1 and 1024, not 0"),
        ({"samples_per_task": 1025}, "samples_per_task must be between 1 and 1024, not 1025"),
        ({"sampling": {"seed": 3}}, "Give the seed as `seed`"),
        ({"task_sets": []}, "There is no task in the task sets: none"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason):
        begin(make_tasks(1, name="a"), **changes)

    assert (Experiment.objects.count(), EvaluationRun.objects.count()) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 3},
        {"feed_settings": {"epochs": 2}},
        {"sampling": {"temperature": 0.0}},
        {"filters": [{"rule": "all_wrong"}]},
        {"mode": "synchronous"},
    ],
)
def test_what_a_run_is_made_of_stays_as_it_is(changes: dict[str, Any]) -> None:
    run = begin(make_tasks(1, name="a"))
    before = Experiment.objects.values().get()

    with pytest.raises(StateConflict, match="of an evaluation stays as it is") as refused:
        update_experiment(experiment_id=run.experiment_id, **changes)

    assert refused.value.code == "evaluation.fixed"
    assert Experiment.objects.values().get() == before
    assert update_experiment(experiment_id=run.experiment_id, priority=4).priority == 4


def test_nobody_pushes_into_a_run_or_rewinds_it() -> None:
    run = begin(make_tasks(1, name="a"))
    experiment = Experiment.objects.get()

    with pytest.raises(StateConflict, match="made by itself"):
        submit_groups(experiment=experiment, requests=[GroupRequest(task_ref="a-000")])
    with pytest.raises(StateConflict, match="Nobody trains on an evaluation"):
        rewind(experiment_id=experiment.pk, version=2)

    assert Group.objects.filter(experiment=run.experiment_id).count() == 1


def test_too_many_rollouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MAX_ROLLOUTS", 3)

    with pytest.raises(InvalidValue, match="2 tasks 2 times are more than 3 rollouts"):
        begin(make_tasks(2, name="a"))
