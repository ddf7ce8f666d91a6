"""Experiments over HTTP."""

from typing import Any

import pytest

from rollouts.feed_options import FeedSettings
from rollouts.models import Experiment, FeedReturn, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.selection_options import Selection
from rollouts.services.feed import feed_experiment
from tests import factories
from tests.api.callers import Caller, assert_problem


def test_create_with_defaults(trainer: Caller) -> None:
    policy = factories.make_policy()

    response = trainer.call("POST", "experiments/", {"name": "first", "policy": policy.name})

    assert response.status_code == 201
    row = Experiment.objects.get()
    assert response.json() == {
        "id": str(row.pk),
        "name": "first",
        "owner": trainer.user.username,
        "policy": policy.name,
        "policy_id": str(policy.pk),
        "policy_version": 3,
        "task_sets": [],
        "purpose": "training",
        "feed": "push",
        "state": "active",
        "group_size": 8,
        "sampling": Sampling().as_dict(),
        "budgets": Budgets().as_dict(),
        "priority": 0,
        "share": 1,
        "max_attempts": 3,
        "failure_reward": 0.0,
        "force": False,
        "max_policy_lag": None,
        "on_policy_lag": "cut",
        "mode": "asynchronous",
        "feed_settings": FeedSettings().as_dict(),
        "filters": [],
        "selection": Selection().as_dict(),
        "feed_epoch": 0,
        "feed_position": 0,
        "feed_detail": "",
        "exhausted": False,
        "created_at": row.created_at.isoformat().replace("+00:00", "Z"),
    }


def test_create_with_everything(trainer: Caller) -> None:
    policy = factories.make_policy()
    by_name, by_id = factories.make_task_set(), factories.make_task_set()

    response = trainer.call(
        "POST",
        "experiments/",
        {
            "name": "all",
            "policy": str(policy.pk),
            "task_sets": [by_name.name, str(by_id.pk), by_name.name],
            "group_size": 16,
            "sampling": {"temperature": 0.5, "max_tokens": 64},
            "budgets": {"max_turns": 4},
            "priority": -5,
            "share": 10,
            "max_attempts": 1,
            "failure_reward": -1.5,
            "feed": "push",
        },
    )

    assert response.status_code == 201
    body = response.json()
    assert sorted(body["task_sets"]) == sorted([by_name.name, by_id.name])
    row = Experiment.objects.get()
    assert row.owner == trainer.user
    assert row.policy == policy
    assert row.sampling == {**Sampling().as_dict(), "temperature": 0.5, "max_tokens": 64}
    assert row.budgets == {**Budgets().as_dict(), "max_turns": 4}
    assert (row.group_size, row.priority, row.share) == (16, -5, 10)
    assert (row.max_attempts, row.failure_reward) == (1, -1.5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": ""}, "name"),
        ({"policy": "nobody"}, "policy"),
        ({"task_sets": ["nothing"]}, "task_sets"),
        ({"task_sets": "tasks"}, "task_sets"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 10_000_000}, "group_size"),
        ({"sampling": {"temperature": -1}}, "sampling"),
        ({"sampling": {"heat": 1}}, "sampling"),
        ({"sampling": []}, "sampling"),
        ({"budgets": {"max_turns": 1.5}}, "budgets"),
        ({"priority": 2**40}, "priority"),
        ({"share": 0}, "share"),
        ({"max_attempts": 21}, "max_attempts"),
        ({"feed": "pipe"}, "feed"),
        ({"mode": "fast"}, "mode"),
        ({"feed_settings": {"batch": 3}}, "feed_settings"),
        ({"feed_settings": {"batch_groups": 4097}}, "feed_settings"),
        ({"feed_settings": {"batch_groups": True}}, "feed_settings"),
        ({"feed_settings": {"weights": {"a": 0}}}, "feed_settings"),
        ({"feed_settings": {"weights": {"a": 1e300}}}, "feed_settings"),
        ({"feed_settings": {"skip": "a"}}, "feed_settings"),
        ({"feed_settings": {"shuffle": 1}}, "feed_settings"),
        ({"feed_settings": {"curriculum": {"low": 0.9, "high": 0.1}}}, "feed_settings"),
        ({"feed_settings": []}, "feed_settings"),
        ({"filters": [{"rule": "nothing"}]}, "filters"),
        ({"filters": {}}, "filters"),
        ({"selection": {"order": "random"}}, "selection"),
        ({"purpose": "evaluation"}, "purpose"),
        ({"owner": "me"}, "owner"),
        ({"state": "stopped"}, "state"),
    ],
)
def test_create_refuses_and_names_the_field(
    trainer: Caller, changes: dict[str, Any], field: str
) -> None:
    given = {"name": "x", "policy": factories.make_policy().name, **changes}

    body = assert_problem(trainer.call("POST", "experiments/", given), 400, "request.invalid")

    assert list(body["errors"]) == [field]
    assert Experiment.objects.count() == 0


def test_create_an_experiment_that_pulls(trainer: Caller) -> None:
    task_set = factories.make_task_set(name="maths")
    given = {
        "name": "x",
        "policy": factories.make_policy().name,
        "task_sets": ["maths"],
        "feed": "pull",
        "mode": "one-step-off",
        "feed_settings": {"batch_groups": 8, "weights": {"maths": 2}, "curriculum": {"high": 0.9}},
        "filters": [{"rule": "no_variance"}],
        "selection": {"order": "finished"},
    }

    response = trainer.call("POST", "experiments/", given)

    assert response.status_code == 201, response.content
    body = response.json()
    assert (body["feed"], body["mode"], body["max_policy_lag"]) == ("pull", "one-step-off", 1)
    assert body["feed_settings"] == {
        **FeedSettings().as_dict(),
        "batch_groups": 8,
        "weights": {"maths": 2.0},
        "curriculum": {"low": 0.0, "high": 0.9, "min_samples": 8, "revisit_epochs": 4},
    }
    assert body["filters"] == [{"rule": "no_variance", "key": "reward"}]
    assert body["selection"] == {**Selection().as_dict(), "order": "finished"}
    row = Experiment.objects.get()
    assert (row.feed_settings, row.selection) == (body["feed_settings"], body["selection"])
    assert list(row.task_sets.all()) == [task_set]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"feed_settings": {}}, "request.invalid", "feed_settings.batch_groups is needed to pull"),
        ({"task_sets": []}, "request.invalid", "feed 'pull' draws from task_sets"),
        (
            {"feed_settings": {"batch_groups": 4096}, "group_size": 1024},
            "request.invalid",
            "would keep 8388608 rollouts in flight, and at most 200000 are",
        ),
        (
            {"feed_settings": {"batch_groups": 8, "groups_in_flight": 7}},
            "request.invalid",
            "a batch of 8 groups would never be full",
        ),
        (
            {"feed_settings": {"batch_groups": 8, "weights": {"physics": 2}}},
            "request.invalid",
            "names 'physics', which is not among the experiment's task sets: maths.",
        ),
        (
            {"mode": "synchronous", "max_policy_lag": 2},
            "experiment.mode_contradicted",
            "'synchronous' does not go with max_policy_lag 2, which is 'asynchronous'",
        ),
        (
            {"max_policy_lag": 0, "selection": {"unfinished": "carry_over"}},
            "experiment.carry_over_at_lag_zero",
            "Set selection.unfinished to 'cancel'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    trainer: Caller, changes: dict[str, Any], code: str, words: str
) -> None:
    factories.make_task_set(name="maths")
    given = {
        "name": "x",
        "policy": factories.make_policy().name,
        "task_sets": ["maths"],
        "feed": "pull",
        "feed_settings": {"batch_groups": 8},
        **changes,
    }

    body = assert_problem(trainer.call("POST", "experiments/", given), 400, code)

    assert words in body["detail"]
    assert Experiment.objects.count() == 0


@pytest.mark.parametrize(
    ("given", "lag", "unfinished", "mode"),
    [
        ({}, None, "carry_over", "asynchronous"),
        ({"mode": "synchronous"}, 0, "cancel", "synchronous"),
        ({"max_policy_lag": 0}, 0, "cancel", "synchronous"),
        ({"mode": "one-step-off"}, 1, "carry_over", "one-step-off"),
        ({"mode": "asynchronous"}, 4, "carry_over", "asynchronous"),
        ({"mode": "asynchronous", "max_policy_lag": 9}, 9, "carry_over", "asynchronous"),
        ({"mode": "asynchronous", "max_policy_lag": None}, None, "carry_over", "asynchronous"),
        (
            {"mode": "one-step-off", "selection": {"unfinished": "cancel"}},
            1,
            "cancel",
            "one-step-off",
        ),
    ],
)
def test_a_mode_is_one_setting(
    trainer: Caller, given: dict[str, Any], lag: int | None, unfinished: str, mode: str
) -> None:
    given = {"name": "x", "policy": factories.make_policy().name, **given}

    body = trainer.call("POST", "experiments/", given).json()

    assert (body["max_policy_lag"], body["mode"]) == (lag, mode)
    assert body["selection"]["unfinished"] == unfinished


def test_detail_counts_rollouts_by_state(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    group = factories.make_group(experiment=experiment)
    factories.make_rollout(group=group)
    factories.make_scored_rollout(group=group)

    body = trainer.call("GET", f"experiments/{experiment.pk}/").json()

    assert body["rollouts"] == {"queued": 1, "init": 0, "run": 0, "eval": 0, "done": 1}
    assert body["coming"] == {"open": 1, "ready": 0}


def test_patch_changes_what_is_given_and_nothing_else(trainer: Caller) -> None:
    task_set = factories.make_task_set()
    experiment = factories.make_experiment(owner=trainer.user, task_sets=[task_set])

    response = trainer.call(
        "PATCH", f"experiments/{experiment.pk}/", {"sampling": {"top_p": 0.9}, "priority": 7}
    )

    assert response.status_code == 200
    assert response.json()["sampling"] == {**Sampling().as_dict(), "top_p": 0.9}
    experiment.refresh_from_db()
    assert (experiment.priority, experiment.group_size) == (7, 2)
    assert list(experiment.task_sets.all()) == [task_set]


def test_patch_in_flight_says_from_what_on_each_change_holds(trainer: Caller) -> None:
    task = factories.make_task(task_set=factories.make_task_set(name="maths"))
    experiment = factories.make_experiment(
        owner=trainer.user,
        task_sets=[task.task_set],
        feed="pull",
        feed_settings={"batch_groups": 3, "seed": 5},
    )
    feed_experiment(experiment_id=experiment.pk)

    response = trainer.call(
        "PATCH",
        f"experiments/{experiment.pk}/",
        {
            "group_size": 4,
            "budgets": {"max_turns": 2},
            "feed_settings": {"skip": ["x"], "shuffle": False},
            "filters": [{"rule": "all_wrong", "key": "exact"}],
            "selection": {"group_deadline_seconds": 60, "order": "finished"},
        },
    )

    assert response.status_code == 200, response.content
    body = response.json()
    assert body["takes_effect"] == {
        "group_size": "groups not yet started",
        "budgets": "rollouts not yet started",
        "feed_settings.skip": "the next draw of the feed",
        "feed_settings.shuffle": "the next epoch of the feed",
        "filters": "groups not yet finished",
        "selection.group_deadline_seconds": "groups not yet started",
        "selection.order": "the next batch",
    }
    assert body["feed_settings"]["batch_groups"] == 3
    assert body["feed_settings"]["seed"] == 5
    assert body["feed_settings"]["skip"] == ["x"]
    assert body["coming"] == {"open": 0, "ready": 0}  # none had started: they are drawn anew
    assert FeedReturn.objects.filter(experiment=experiment).count() == 6


def test_patch_to_lag_zero_says_what_else_must_change(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    path = f"experiments/{experiment.pk}/"

    refused = trainer.call("PATCH", path, {"max_policy_lag": 0})

    assert_problem(refused, 400, "experiment.carry_over_at_lag_zero")
    experiment.refresh_from_db()
    assert experiment.max_policy_lag is None
    body = trainer.call("PATCH", path, {"mode": "synchronous"}).json()
    assert (body["max_policy_lag"], body["selection"]["unfinished"]) == (0, "cancel")
    body = trainer.call("PATCH", path, {"mode": "asynchronous"}).json()
    assert (body["max_policy_lag"], body["selection"]["unfinished"]) == (4, "carry_over")


def test_a_feed_that_is_used_up_says_so(trainer: Caller) -> None:
    task = factories.make_task()
    experiment = factories.make_experiment(
        owner=trainer.user,
        task_sets=[task.task_set],
        feed="pull",
        feed_settings={"batch_groups": 3, "epochs": 2},
    )
    feed_experiment(experiment_id=experiment.pk)

    body = trainer.call("GET", f"experiments/{experiment.pk}/").json()

    assert (body["exhausted"], body["feed_detail"]) == (True, "epoch 2 of 2 is used up")
    assert (body["feed_epoch"], body["feed_position"]) == (2, 0)
    assert body["coming"] == {"open": 2, "ready": 0}


def test_rewind_over_http(make_caller: Any) -> None:
    caller = make_caller(scopes=["read", "submit", "policy"])
    experiment = factories.make_experiment(owner=caller.user)
    group = factories.make_ready_group(experiment=experiment, newest_version=3)
    batch = factories.make_batch(groups=[group])
    path = f"experiments/{experiment.pk}/rewind/"

    newer = caller.call("POST", path, {"version": 4})
    response = caller.call("POST", path, {"version": 3})

    assert_problem(newer, 400, "policy.version_not_older")
    assert response.status_code == 200, response.content
    assert response.json() == {
        "version": 3,
        "batches": 1,
        "groups_ready": 1,
        "groups_filtered": 0,
        "tasks_returned": 0,
        "rollouts_cancelled": 0,
        "servers": [],
    }
    batch.refresh_from_db()
    group.refresh_from_db()
    assert (batch.state, group.state) == ("rewound", "ready")
    assert_problem(caller.call("POST", path, {}), 400, "request.invalid")
    assert_problem(caller.call("POST", path, {"version": -1}), 400, "request.invalid")


def test_rewind_needs_the_scope_of_policies_and_the_experiment(make_caller: Any) -> None:
    caller = make_caller(scopes=["read", "submit"])
    experiment = factories.make_experiment(owner=caller.user)
    foreign = factories.make_experiment()
    stranger = make_caller(scopes=["read", "submit", "policy"])

    refused = caller.call("POST", f"experiments/{experiment.pk}/rewind/", {"version": 3})
    hidden = stranger.call("POST", f"experiments/{foreign.pk}/rewind/", {"version": 2})

    assert refused.status_code == 403
    assert hidden.status_code == 404
    foreign.policy.refresh_from_db()
    assert foreign.policy.version == 3


def test_going_back_without_a_rewind_is_refused_and_says_how(make_caller: Any) -> None:
    caller = make_caller(scopes=["read", "policy"])
    policy = factories.make_policy(owner=caller.user)

    response = caller.call(
        "POST", f"policies/{policy.pk}/updates/", {"version": 2, "mode": "abort"}
    )

    body = assert_problem(response, 409, "policy.version_not_newer")
    assert "POST experiments/{id}/rewind/" in body["detail"]


@pytest.mark.parametrize("changes", [{"policy": "other"}, {"feed": "push"}, {"group_size": -1}])
def test_patch_refuses_what_cannot_change(trainer: Caller, changes: dict[str, Any]) -> None:
    experiment = factories.make_experiment(owner=trainer.user)

    response = trainer.call("PATCH", f"experiments/{experiment.pk}/", {"priority": 9, **changes})

    assert_problem(response, 400, "request.invalid")
    experiment.refresh_from_db()
    assert experiment.priority == 0


def test_pause_resume_stop(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    rollout = factories.make_rollout(group=factories.make_group(experiment=experiment))
    path = f"experiments/{experiment.pk}"

    assert trainer.call("POST", f"{path}/pause/").json()["state"] == "paused"
    assert trainer.call("POST", f"{path}/resume/").json()["state"] == "active"
    stopped = trainer.call("POST", f"{path}/stop/")

    assert stopped.status_code == 202
    assert stopped.json() == {"state": "stopped", "cancelled": 1}
    rollout.refresh_from_db()
    assert (rollout.state, rollout.outcome, rollout.reward) == ("done", "cancelled", None)
    assert_problem(trainer.call("POST", f"{path}/resume/"), 409, "experiment.stopped")
    assert_problem(trainer.call("POST", f"{path}/pause/"), 409, "experiment.stopped")


def test_list_filters_and_pages_without_losing_or_repeating(trainer: Caller) -> None:
    made = [factories.make_experiment(owner=trainer.user) for _ in range(5)]
    paused = factories.make_experiment(owner=trainer.user, state="paused")

    assert [
        each["id"] for each in trainer.call("GET", "experiments/?state=paused").json()["results"]
    ] == [str(paused.pk)]
    seen = []
    address = "/api/v1/experiments/?page_size=2&state=active"
    while address:
        page = trainer.call("GET", address).json()
        seen += [each["id"] for each in page["results"]]
        address = (page["next"] or "").removeprefix("http://testserver")
    assert seen == [str(each.pk) for each in reversed(made)]


def test_stop_leaves_other_experiments_alone(trainer: Caller) -> None:
    experiment, other = (factories.make_experiment(owner=trainer.user) for _ in range(2))
    kept = factories.make_rollout(group=factories.make_group(experiment=other))

    trainer.call("POST", f"experiments/{experiment.pk}/stop/")

    assert Rollout.objects.get().state == kept.state == "queued"
