"""Experiments over HTTP."""

from typing import Any

import pytest

from rollouts.models import Experiment, Rollout
from rollouts.options import Budgets, Sampling
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
        "feed": "push",
        "state": "active",
        "group_size": 8,
        "sampling": Sampling().as_dict(),
        "budgets": Budgets().as_dict(),
        "priority": 0,
        "share": 1,
        "max_attempts": 3,
        "failure_reward": 0.0,
        "max_policy_lag": None,
        "on_policy_lag": "cut",
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


def test_pull_is_refused_clearly(trainer: Caller) -> None:
    given = {"name": "x", "policy": factories.make_policy().name, "feed": "pull"}

    assert_problem(trainer.call("POST", "experiments/", given), 400, "feed.not_supported")
    assert Experiment.objects.count() == 0


def test_detail_counts_rollouts_by_state(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    group = factories.make_group(experiment=experiment)
    factories.make_rollout(group=group)
    factories.make_scored_rollout(group=group)

    body = trainer.call("GET", f"experiments/{experiment.pk}/").json()

    assert body["rollouts"] == {"queued": 1, "init": 0, "run": 0, "eval": 0, "done": 1}


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
