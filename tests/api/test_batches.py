"""Batches over HTTP, without waiting."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from rollouts.models import Batch, Experiment, Group, Trajectory
from tests import factories
from tests.api.callers import Caller, assert_problem


@pytest.fixture
def experiment(trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


def lease(caller: Caller, experiment: Experiment, body: Any, **headers: str) -> Any:
    return caller.call("POST", f"experiments/{experiment.pk}/batches/", body, **headers)


def content(response: Any) -> bytes:
    return b"".join(response.streaming_content)


def test_lease_gives_the_first_finished_groups_with_their_tokens(
    trainer: Caller, experiment: Experiment
) -> None:
    first, second, third = (
        factories.make_ready_group(experiment=experiment, metadata={"step": step})
        for step in range(3)
    )

    response = lease(trainer, experiment, {"groups": 2})

    assert (response.status_code, response["Content-Type"]) == (200, "application/json")
    body = json.loads(content(response))
    batch = Batch.objects.get()
    assert response["Batch-Id"] == body["id"] == str(batch.pk)
    assert (body["state"], body["group_count"], body["policy_version"]) == ("leased", 2, 3)
    assert [each["group"] for each in body["trajectories"]] == [
        str(group.pk) for group in (first, first, second, second)
    ]
    rollout = first.rollouts.get(sample=0)
    assert body["trajectories"][0] == {
        "rollout": str(rollout.pk),
        "group": str(first.pk),
        "task": str(first.task_id),
        "task_ref": first.task.ref,
        "sample": 0,
        "environment": first.environment.ref,
        "outcome": "scored",
        "stop_reason": "finished",
        "failure_code": None,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "trainable": True,
        "policy_version": {"first": 3, "last": 3},
        "turns": 1,
        "timings": {"run": 0.5},
        "segments": [
            {
                "id": 0,
                "parent": None,
                "fork_reason": None,
                "sampling": {"temperature": 1.0},
                "logprob_mode": "sampled",
                "turns": [{"start": 0, "end": 1, "finish_reason": "stop", "reward": None}],
                "prompt_ids": [1, 2, 3],
                "response_ids": [11, 12],
                "response_mask": [1, 0],
                "response_logprobs": [-0.5, 0.0],
                "policy_versions": [[3, 2]],
            }
        ],
        "messages": [{"role": "user", "content": "Say hello."}],
        "tools": [],
        "agent": {},
        "unknown_version_tokens": 0,
        "metadata": {"step": 0},
    }
    assert sorted(Group.objects.values_list("state", flat=True)) == ["leased", "leased", "ready"]
    third.refresh_from_db()
    assert third.state == "ready"


def test_fewer_groups_than_asked_for(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)

    response = lease(trainer, experiment, {"groups": 2})

    assert (response.status_code, response.content) == (204, b"")
    assert Batch.objects.count() == 0
    group.refresh_from_db()
    assert group.state == "ready"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"groups": 0},
        {"groups": 4097},
        {"groups": "all"},
        {"groups": 1, "wait_seconds": -1},
        {"groups": 1, "wait_seconds": "long"},
        {"groups": 1, "min_complete_fraction": 1.5},
        {"groups": 1, "max_policy_lag": -1},
        {"groups": 1, "max_policy_lag": 0.5},
        {"groups": 10**6},
        {"groups": 1, "min_complete": 2},
    ],
)
def test_lease_refuses(trainer: Caller, experiment: Experiment, body: Any) -> None:
    factories.make_ready_group(experiment=experiment)

    assert_problem(lease(trainer, experiment, body), 400, "request.invalid")
    assert Batch.objects.count() == 0


def test_the_same_batch_again(trainer: Caller, experiment: Experiment) -> None:
    factories.make_ready_group(experiment=experiment)
    first = json.loads(content(lease(trainer, experiment, {"groups": 1})))

    again = trainer.call("GET", f"batches/{first['id']}/")

    assert json.loads(content(again)) == first


def test_one_trajectory_a_line(trainer: Caller, experiment: Experiment) -> None:
    factories.make_ready_group(experiment=experiment)

    response = lease(trainer, experiment, {"groups": 1}, Accept="application/x-ndjson")

    assert response["Content-Type"] == "application/x-ndjson"
    lines = content(response).splitlines()
    whole = trainer.call("GET", f"batches/{response['Batch-Id']}/")
    assert [json.loads(line) for line in lines] == json.loads(content(whole))["trajectories"]
    read = trainer.call("GET", f"batches/{response['Batch-Id']}/", Accept="application/x-ndjson")
    assert content(read).splitlines() == lines


def test_refusal_of_a_caller_who_wants_lines_is_a_problem(
    trainer: Caller, experiment: Experiment
) -> None:
    response = lease(trainer, experiment, {"groups": 0}, Accept="application/x-ndjson")

    assert_problem(response, 400, "request.invalid")


def test_rollout_that_left_no_tokens(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_group(experiment=experiment, state="ready", size=1, done_count=1)
    factories.make_rollout(
        group=group,
        state="done",
        outcome="infra_failed",
        failure_code="sandbox.image_missing",
        done_at=timezone.now(),
    )

    (only,) = json.loads(content(lease(trainer, experiment, {"groups": 1})))["trajectories"]

    assert (only["outcome"], only["reward"]) == ("infra_failed", None)
    assert (only["failure_code"], only["trainable"]) == ("sandbox.image_missing", False)
    assert (only["segments"], only["policy_version"]) == ([], {"first": None, "last": None})


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_trajectory_that_cannot_be_read_does_not_hold_up_the_rest(
    trainer: Caller, experiment: Experiment, trajectory_store: Path, fault: str
) -> None:
    group = factories.make_ready_group(experiment=experiment)
    file = trajectory_store / Trajectory.objects.get(rollout__sample=0).path
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(b"{}")

    bad, good = json.loads(content(lease(trainer, experiment, {"groups": 1})))["trajectories"]

    assert bad["error"]["code"] == f"trajectory.{fault}"
    assert (bad["trainable"], bad["segments"], bad["reward"]) == (False, [], 1.0)
    assert "error" not in good
    assert (good["trainable"], good["reward"]) == (True, 0.0)
    failed = trainer.call("GET", f"rollouts/{group.rollouts.get(sample=0).pk}/trajectory/")
    assert_problem(failed, 404, f"trajectory.{fault}")


def test_acknowledging_twice_is_acknowledging_once(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)
    batch = factories.make_batch(groups=[group])

    first = trainer.call("POST", f"batches/{batch.pk}/ack/")
    second = trainer.call("POST", f"batches/{batch.pk}/ack/")

    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["state"] == "acknowledged"
    assert second.json() == first.json()
    group.refresh_from_db()
    assert group.state == "consumed"
    assert trainer.call("GET", f"batches/{batch.pk}/").status_code == 200


def test_batch_given_back_can_be_leased_again(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)
    batch = factories.make_batch(groups=[group])

    assert trainer.call("POST", f"batches/{batch.pk}/nack/").json()["state"] == "returned"

    assert_problem(trainer.call("GET", f"batches/{batch.pk}/"), 410, "batch.returned")
    assert_problem(trainer.call("POST", f"batches/{batch.pk}/ack/"), 409, "batch.returned")
    body = {"seconds": 60}
    assert_problem(trainer.call("POST", f"batches/{batch.pk}/extend/", body), 409, "batch.returned")
    again = json.loads(content(lease(trainer, experiment, {"groups": 1})))
    assert {each["group"] for each in again["trajectories"]} == {str(group.pk)}


def test_batch_whose_lease_ran_out(trainer: Caller, experiment: Experiment) -> None:
    past = timezone.now() - timedelta(seconds=1)
    batch = factories.make_batch(
        groups=[factories.make_ready_group(experiment=experiment)], lease_expires_at=past
    )

    assert_problem(trainer.call("GET", f"batches/{batch.pk}/"), 410, "batch.expired")
    assert_problem(trainer.call("POST", f"batches/{batch.pk}/ack/"), 409, "batch.expired")
    assert_problem(trainer.call("POST", f"batches/{batch.pk}/nack/"), 409, "batch.expired")
    batch.refresh_from_db()
    assert batch.state == "leased"


def test_acknowledged_batch_is_not_given_back(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)
    batch = factories.make_batch(groups=[group])
    trainer.call("POST", f"batches/{batch.pk}/ack/")

    response = trainer.call("POST", f"batches/{batch.pk}/nack/")

    assert_problem(response, 409, "batch.acknowledged")
    group.refresh_from_db()
    assert group.state == "consumed"


def test_longer_lease(trainer: Caller, experiment: Experiment) -> None:
    batch = factories.make_batch(groups=[factories.make_ready_group(experiment=experiment)])
    before = timezone.now()

    response = trainer.call("POST", f"batches/{batch.pk}/extend/", {"seconds": 7200})

    batch.refresh_from_db()
    assert response.status_code == 200
    assert before + timedelta(seconds=7200) <= batch.lease_expires_at
    assert batch.lease_expires_at <= timezone.now() + timedelta(seconds=7200)


@pytest.mark.parametrize("seconds", [0, -5, 86_401, "long", None])
def test_longer_lease_refuses(trainer: Caller, experiment: Experiment, seconds: Any) -> None:
    batch = factories.make_batch(groups=[factories.make_ready_group(experiment=experiment)])

    response = trainer.call("POST", f"batches/{batch.pk}/extend/", {"seconds": seconds})

    assert_problem(response, 400, "request.invalid")
    assert Batch.objects.get().lease_expires_at == batch.lease_expires_at


def test_list(trainer: Caller, experiment: Experiment) -> None:
    batch = factories.make_batch(groups=[factories.make_ready_group(experiment=experiment)])
    other = factories.make_experiment(owner=trainer.user)
    factories.make_batch(groups=[factories.make_ready_group(experiment=other)])

    of_experiment = trainer.call("GET", f"experiments/{experiment.pk}/batches/").json()

    assert [each["id"] for each in of_experiment["results"]] == [str(batch.pk)]
    assert "trajectories" not in of_experiment["results"][0]
    assert len(trainer.call("GET", "batches/").json()["results"]) == 2
    assert trainer.call("GET", "batches/?state=returned").json()["results"] == []


def test_more_than_a_batch_can_hold_is_said_clearly(
    trainer: Caller, experiment: Experiment
) -> None:
    problem = assert_problem(lease(trainer, experiment, {"groups": 10**6}), 400, "request.invalid")

    assert "One batch holds at most 4096 groups; lease several batches." in json.dumps(problem)


def test_more_than_a_feed_ever_has_is_said_instead_of_waited_for(trainer: Caller) -> None:
    experiment = factories.make_experiment(
        owner=trainer.user, feed="pull", feed_settings={"batch_groups": 4}
    )

    problem = assert_problem(
        lease(trainer, experiment, {"groups": 9, "wait_seconds": 50}), 400, "batch.too_large"
    )

    assert problem["detail"].startswith("The experiment's feed keeps at most 8 groups")


def test_trainer_that_lost_its_batch_gets_it_again(trainer: Caller, experiment: Experiment) -> None:
    for _each in range(3):
        factories.make_ready_group(experiment=experiment)
    first = json.loads(content(lease(trainer, experiment, {"groups": 2})))
    assert (first["number"], first["repeats"], first["max_lag"]) == (1, None, None)
    trainer.call("POST", f"batches/{first['id']}/nack/")

    again = json.loads(content(lease(trainer, experiment, {"groups": 2})))

    assert again["trajectories"] == first["trajectories"]
    assert (again["number"], again["repeats"]) == (2, first["id"])


def test_what_is_older_than_wished_for_is_filtered(trainer: Caller, experiment: Experiment) -> None:
    old = factories.make_ready_group(experiment=experiment, oldest_version=1, newest_version=3)
    young = factories.make_ready_group(experiment=experiment, oldest_version=2, newest_version=2)

    batch = json.loads(content(lease(trainer, experiment, {"groups": 1, "max_policy_lag": 1})))

    assert {each["group"] for each in batch["trajectories"]} == {str(young.pk)}
    assert batch["max_lag"] == 1
    old.refresh_from_db()
    assert (old.state, old.filter_rule) == ("filtered", "too_stale")


def test_less_complete_groups_are_passed_over(trainer: Caller, experiment: Experiment) -> None:
    part = factories.make_ready_group(experiment=experiment, rewards=[1.0, 0.0])
    part.rollouts.filter(sample=1).update(outcome="infra_failed", reward=None)
    whole = factories.make_ready_group(experiment=experiment)
    body = {"groups": 1, "min_complete_fraction": 1.0, "max_policy_lag": None}

    batch = json.loads(content(lease(trainer, experiment, body)))

    assert {each["group"] for each in batch["trajectories"]} == {str(whole.pk)}
    assert lease(trainer, experiment, body).status_code == 204
    part.refresh_from_db()
    assert part.state == "ready"


def test_rewound_batch_is_gone(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)
    batch = factories.make_batch(groups=[group])
    Group.objects.update(state="ready", batch=None)
    Batch.objects.update(state="rewound", closed_at=timezone.now())

    assert_problem(trainer.call("GET", f"batches/{batch.pk}/"), 410, "batch.rewound")
    assert_problem(trainer.call("POST", f"batches/{batch.pk}/ack/"), 409, "batch.rewound")


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_batch_of_another_trainer_is_not_there(trainer: Caller, verb: str) -> None:
    group = factories.make_ready_group()
    batch = factories.make_batch(groups=[group])

    response = trainer.call("POST", f"batches/{batch.pk}/{verb}/", {"seconds": 60})

    assert response.status_code == 404
    batch.refresh_from_db()
    group.refresh_from_db()
    assert (batch.state, group.state) == ("leased", "leased")
