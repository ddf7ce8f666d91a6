"""Submitting tasks, and waiting for what becomes of them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from prorl_client import (
    Client,
    Experiment,
    InlineTask,
    NothingLeft,
    TaskRecord,
    WaitTimedOut,
    submissions,
)

from tests.clients import shapes
from tests.clients.scripted import BROKEN, Asked, Reply, Scripted, problem

GROUPS = "/experiments/e1/groups/"
TASK_ID = UUID("00000000-0000-0000-0000-0000000000aa")


@pytest.fixture
def experiment(service: Scripted, client: Client) -> Experiment:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("POST", GROUPS, accept)
    return client.experiment("e1")


def accept(asked: Asked) -> Reply:
    groups = [
        {"id": f"{asked.key}:{place}", "task": "t", "samples": 2, "rollouts": ["r1", "r2"]}
        for place, _entry in enumerate(asked.body["groups"])
    ]
    return Reply(202, {"groups": groups})


def group(state: str, name: str = "g1", **values: Any) -> Reply:
    body = {"id": name, "experiment": "e1", "task": "t", "samples": 2, "state": state, **values}
    return Reply(body=body)


def test_every_way_to_name_a_task(service: Scripted, experiment: Experiment) -> None:
    record = TaskRecord.parse({"id": "t9", "task_set": "s", "ref": "r", "environment": "e@1"})
    inline = InlineTask(environment="calc", instruction="1+1?", hidden={"answer": 2})

    experiment.submit(
        [
            "sum",
            TASK_ID,
            record,
            inline,
            {"task_ref": "own", "samples": 9},
            {"inline": inline, "metadata": {"epoch": 1}},
        ],
        samples=4,
        metadata={"run": "a"},
    )

    common = {"samples": 4, "metadata": {"run": "a"}}
    sent_inline = {"environment": "calc", "instruction": "1+1?", "hidden": {"answer": 2}}
    assert service.calls("POST", GROUPS)[0].body == {
        "groups": [
            {**common, "task_ref": "sum"},
            {**common, "task": str(TASK_ID)},
            {**common, "task": "t9"},
            {**common, "inline": sent_inline},
            {**common, "task_ref": "own", "samples": 9},
            {**common, "inline": sent_inline, "metadata": {"epoch": 1}},
        ]
    }


def test_what_names_no_task_is_refused_before_anything_is_sent(
    service: Scripted, experiment: Experiment
) -> None:
    bad: Any = ["sum", 5]

    with pytest.raises(TypeError, match="int names no task"):
        experiment.submit(bad)

    assert service.calls("POST", GROUPS) == []


def test_many_tasks_go_in_several_calls_with_keys_of_their_own(
    service: Scripted, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "GROUPS_PER_CALL", 2)

    groups = experiment.submit(["a", "b", "c", "d", "e"], idempotency_key="mine")

    asked = service.calls("POST", GROUPS)
    assert [[each["task_ref"] for each in one.body["groups"]] for one in asked] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    assert [each.key for each in asked] == ["mine-0", "mine-1", "mine-2"]
    assert [each.id for each in groups] == [
        "mine-0:0",
        "mine-0:1",
        "mine-1:0",
        "mine-1:1",
        "mine-2:0",
    ]
    assert (groups[0].experiment, groups[0].rollouts) == ("e1", ("r1", "r2"))


def test_large_tasks_go_in_calls_of_a_bounded_size(
    service: Scripted, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "BYTES_PER_CALL", 1000)
    tasks = [InlineTask(environment="e", instruction="x" * size) for size in (600, 600, 2000, 10)]

    experiment.submit(tasks)

    assert [len(each.body["groups"]) for each in service.calls("POST", GROUPS)] == [1, 1, 1, 1]


def test_lost_answer_submits_nothing_twice(service: Scripted, experiment: Experiment) -> None:
    running = problem(409, "idempotency.running", retry_after=0)
    service.on("POST", GROUPS, BROKEN, running, accept)

    assert len(experiment.submit(["a"])) == 1

    asked = service.calls("POST", GROUPS)
    assert len({each.key for each in asked}) == 1
    assert len(asked) == 3


def test_nothing_to_submit_is_no_call(service: Scripted, experiment: Experiment) -> None:
    assert experiment.submit([]) == []
    assert service.calls("POST", GROUPS) == []


def test_group_is_waited_for(service: Scripted, client: Client) -> None:
    service.on("GET", "/groups/g1/", group("open"), group("open"), BROKEN, group("ready", done=2))

    ready = client.group("g1").wait()

    assert (ready.state, ready.done) == ("ready", 2)


def test_groups_are_waited_for_together_and_come_in_their_order(
    service: Scripted, client: Client
) -> None:
    service.on("GET", "/groups/g1/", group("open"), group("open"), group("filtered"))
    service.on("GET", "/groups/g2/", group("ready", "g2"))
    groups = [client.group("g1"), client.group("g2")]

    assert [each.state for each in client.wait(groups, progress=True)] == ["filtered", "ready"]
    assert len(service.calls("GET", "/groups/g2/")) == 1


def test_wait_for_a_group_that_does_not_end(service: Scripted, client: Client) -> None:
    service.on("GET", "/groups/g1/", group("open"))

    with pytest.raises(WaitTimedOut, match="1 of 1 groups"):
        client.group("g1").wait(timeout=0)


def test_rollout_is_waited_for_cancelled_and_read(service: Scripted, client: Client) -> None:
    row = {"id": "r1", "experiment": "e1", "group": "g1", "task": "t", "task_ref": "sum"}
    row = {**row, "sample": 0, "environment": "e@1"}
    running, done = {**row, "state": "run"}, {**row, "state": "done", "outcome": "scored"}
    service.on("GET", "/rollouts/r1/", Reply(body=running), Reply(body=running), Reply(body=done))
    service.on("GET", "/rollouts/r1/trajectory/", Reply(body=shapes.trajectory(7)))
    service.on("POST", "/rollouts/r1/cancel/", Reply(202, running))

    rollout = client.rollout("r1")

    assert rollout.cancel().state == "run"
    assert rollout.wait().outcome == "scored"
    assert rollout.trajectory().sample == 7
    assert rollout.state == "run"  # what was seen does not change


def test_trajectories_of_a_group(service: Scripted, client: Client) -> None:
    service.on("GET", "/groups/g1/", group("filtered"))
    lines = shapes.ndjson_batch(shapes.trajectory(0), shapes.trajectory(1))
    service.on("GET", "/groups/g1/trajectories/", lines)

    found = client.group("g1").trajectories()

    assert [each.sample for each in found] == [0, 1]
    assert found[0].messages is not None


def test_experiment_is_changed_paused_stopped_and_rewound(
    service: Scripted, experiment: Experiment
) -> None:
    service.on("PATCH", "/experiments/e1/", Reply(body=shapes.experiment(group_size=16)))
    service.on("POST", "/experiments/e1/pause/", Reply(body=shapes.experiment(state="paused")))
    service.on("POST", "/experiments/e1/resume/", Reply(body=shapes.experiment()))
    service.on("POST", "/experiments/e1/stop/", Reply(202, {"state": "stopped", "cancelled": 3}))
    service.on("POST", "/experiments/e1/rewind/", Reply(body={"version": 2, "batches": 1}))
    service.on("GET", "/experiments/e1/metrics/", Reply(body={"throughput": 1.5}))

    assert experiment.change(group_size=16).group_size == 16
    assert experiment.pause().state == "paused"
    assert experiment.resume().state == "active"
    assert experiment.stop() == 3
    assert experiment.rewind(2)["batches"] == 1
    assert experiment.metrics() == {"throughput": 1.5}
    assert service.calls("POST", "/experiments/e1/rewind/")[0].body == {
        "version": 2,
        "force": False,
    }


def test_evaluation_is_begun_once_waited_for_and_compared(
    service: Scripted, client: Client
) -> None:
    row = {"id": "v1", "name": "v", "experiment": "e2", "policy": "tiny", "policy_version": 3}
    service.on("POST", "/evaluations/", BROKEN, Reply(201, row))
    running = Reply(body={**row, "state": "running"})
    done = Reply(body={**row, "state": "done", "overall": {"right": 5}})
    service.on("GET", "/evaluations/v1/", Reply(body={**row, "state": "starting"}), running, done)
    service.on("GET", "/evaluations/v1/compare/", Reply(body={"wins": 1}))

    begun = client.evaluate("v", "tiny", ["math"], samples_per_task=4, seed=1)
    found = begun.wait(timeout=60)

    sent = service.calls("POST", "/evaluations/")
    assert sent[0].key == sent[1].key
    assert sent[0].body == {
        "name": "v",
        "policy": "tiny",
        "task_sets": ["math"],
        "samples_per_task": 4,
        "seed": 1,
    }
    assert (begun.state, found.state, found.overall) == ("starting", "done", {"right": 5})
    assert found.compare("v0") == {"wins": 1}
    assert service.calls("GET", "/evaluations/v1/compare/")[0].query == {"with": ["v0"]}


def test_evaluation_that_does_not_end(service: Scripted, client: Client) -> None:
    row = {"id": "v1", "name": "v", "experiment": "e2", "policy": "tiny", "policy_version": 3}
    service.on("GET", "/evaluations/v1/", Reply(body={**row, "state": "running"}))
    with pytest.raises(WaitTimedOut, match="still running"):
        client.evaluation("v1").wait(timeout=0)

    service.on("GET", "/evaluations/v1/", Reply(body={**row, "state": "stopped"}))
    with pytest.raises(NothingLeft, match="is stopped"):
        client.evaluation("v1").wait()
