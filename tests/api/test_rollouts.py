"""Rollouts over HTTP."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from rollouts.models import Rollout
from tests import factories
from tests.api.callers import Caller, assert_problem


@pytest.fixture
def group(trainer: Caller) -> Any:
    return factories.make_group(experiment=factories.make_experiment(owner=trainer.user))


def test_detail_says_state_reason_time_and_place(trainer: Caller, group: Any) -> None:
    node = factories.make_node()
    rollout = factories.make_scored_rollout(group=group, node=node, reward=0.5, restarts=1)

    assert trainer.call("GET", f"rollouts/{rollout.pk}/").json() == {
        "id": str(rollout.pk),
        "experiment": str(group.experiment_id),
        "group": str(group.pk),
        "task": str(group.task_id),
        "task_ref": group.task.ref,
        "sample": 0,
        "environment": group.environment.ref,
        "state": "done",
        "outcome": "scored",
        "stop_reason": "finished",
        "failure_code": None,
        "failure_detail": None,
        "reward": 0.5,
        "rewards": {"exact": 0.5},
        "timings": {"run": 0.5},
        "node": node.name,
        "turns": 1,
        "sampled_tokens": 2,
        "tool_calls": 0,
        "restarts": 1,
        "replaced": False,
        "cancel_requested_at": None,
        "created_at": rollout.created_at.isoformat().replace("+00:00", "Z"),
        "done_at": rollout.done_at.isoformat().replace("+00:00", "Z"),
        "answer": "hello",
        "last_message": "",
    }


def test_list_filters(trainer: Caller, group: Any) -> None:
    node = factories.make_node()
    queued = factories.make_rollout(group=group)
    scored = factories.make_scored_rollout(group=group, node=node)
    failed = factories.make_rollout(
        group=factories.make_group(experiment=group.experiment),
        state="done",
        outcome="infra_failed",
        failure_code="sandbox.image_missing",
        done_at=timezone.now(),
    )
    expected = {
        "state=queued": {queued},
        "state=queued&state=done": {queued, scored, failed},
        "outcome=scored": {scored},
        "outcome=infra_failed&outcome=timed_out": {failed},
        "stop_reason=finished": {scored},
        "failure_code=sandbox.image_missing": {failed},
        f"group={group.pk}": {queued, scored},
        f"task={group.task_id}": {queued, scored},
        f"experiment={group.experiment_id}": {queued, scored, failed},
        f"experiment={uuid4()}": set(),
        f"node={node.name}": {scored},
        "node=nowhere": set(),
        "created_after=2001-01-01T00:00:00Z": {queued, scored, failed},
        "created_before=2001-01-01T00:00:00Z": set(),
    }

    for query, rollouts in expected.items():
        results = trainer.call("GET", f"rollouts/?{query}").json()["results"]
        assert {each["id"] for each in results} == {str(each.pk) for each in rollouts}, query
        assert all("answer" not in each for each in results)


def test_attempts_oldest_first(trainer: Caller, group: Any) -> None:
    rollout = factories.make_rollout(group=group)
    worker = factories.make_worker(stage="init")
    lost = factories.make_attempt(
        rollout=rollout,
        state="lost",
        node=worker.node,
        worker=worker,
        failure_code="worker.lost",
        ended_at=timezone.now(),
    )
    waiting = factories.make_attempt(rollout=rollout, number=2)

    body = trainer.call("GET", f"rollouts/{rollout.pk}/attempts/").json()

    assert [each["id"] for each in body] == [str(lost.pk), str(waiting.pk)]
    assert (body[0]["node"], body[0]["pid"]) == (worker.node.name, 4242)
    assert (body[0]["state"], body[0]["failure_code"]) == ("lost", "worker.lost")
    assert (body[1]["node"], body[1]["pid"], body[1]["number"]) == (None, None, 2)
    assert "lease_token" not in body[0]


def test_trajectory(trainer: Caller, group: Any) -> None:
    rollout = factories.make_scored_rollout(group=group)
    factories.make_trajectory(rollout=rollout, tokens=[5, 6, 7])

    body = trainer.call("GET", f"rollouts/{rollout.pk}/trajectory/").json()

    assert body["rollout"] == str(rollout.pk)
    assert body["segments"][0]["response_ids"] == [5, 6, 7]
    assert (body["reward"], body["trainable"]) == (1.0, True)


def test_rollout_without_a_trajectory(trainer: Caller, group: Any) -> None:
    rollout = factories.make_rollout(group=group)

    response = trainer.call("GET", f"rollouts/{rollout.pk}/trajectory/")

    assert_problem(response, 404, "trajectory.none")


def test_cancel_of_what_waits_ends_it_at_once(trainer: Caller, group: Any) -> None:
    rollout = factories.make_rollout(group=group)

    response = trainer.call("POST", f"rollouts/{rollout.pk}/cancel/")

    assert response.status_code == 202
    body = response.json()
    assert (body["state"], body["outcome"], body["reward"]) == ("done", "cancelled", None)
    assert_problem(trainer.call("POST", f"rollouts/{rollout.pk}/cancel/"), 409, "rollout.done")


def test_cancel_of_what_runs_asks_its_worker(trainer: Caller, group: Any) -> None:
    worker = factories.make_worker()
    rollout = factories.make_rollout(group=group, state="run", node=worker.node)
    factories.make_attempt(
        rollout=rollout,
        stage="run",
        state="running",
        worker=worker,
        lease_token=uuid4(),
        started_at=timezone.now() - timedelta(seconds=1),
    )

    response = trainer.call("POST", f"rollouts/{rollout.pk}/cancel/")

    assert response.status_code == 202
    assert response.json()["state"] == "run"
    assert response.json()["cancel_requested_at"] is not None
    again = trainer.call("POST", f"rollouts/{rollout.pk}/cancel/")
    assert again.status_code == 202
    assert again.json()["cancel_requested_at"] == response.json()["cancel_requested_at"]


def test_cancel_of_what_is_done_changes_nothing(trainer: Caller, group: Any) -> None:
    rollout = factories.make_scored_rollout(group=group)

    assert_problem(trainer.call("POST", f"rollouts/{rollout.pk}/cancel/"), 409, "rollout.done")

    row = Rollout.objects.get()
    assert (row.outcome, row.reward, row.cancel_requested_at) == ("scored", 1.0, None)
