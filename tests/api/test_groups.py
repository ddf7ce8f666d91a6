"""Groups over HTTP."""

import json
from typing import Any
from uuid import uuid4

import pytest

from rollouts.models import Experiment, Group, Rollout, Task, TaskSet
from tests import factories
from tests.api.callers import Caller, assert_problem


@pytest.fixture
def task(db: None) -> Task:
    return factories.make_task()


@pytest.fixture
def experiment(trainer: Caller, task: Task) -> Experiment:
    return factories.make_experiment(owner=trainer.user, task_sets=[task.task_set])


def submit(caller: Caller, experiment: Experiment, body: Any) -> Any:
    return caller.call("POST", f"experiments/{experiment.pk}/groups/", body)


def test_push_by_id_and_by_reference(trainer: Caller, experiment: Experiment, task: Task) -> None:
    response = submit(
        trainer,
        experiment,
        {
            "groups": [
                {"task": str(task.pk), "samples": 3, "priority": 2, "metadata": {"step": 7}},
                {"task_ref": task.ref},
            ]
        },
    )

    assert response.status_code == 202
    first, second = Group.objects.order_by("sequence")
    assert (first.size, first.priority, first.metadata) == (3, 2, {"step": 7})
    assert (second.size, second.priority, second.metadata) == (2, 0, {})
    assert response.json() == {
        "groups": [
            {
                "id": str(group.pk),
                "task": str(task.pk),
                "samples": group.size,
                "rollouts": [
                    str(pk) for pk in group.rollouts.order_by("sample").values_list("pk", flat=True)
                ],
            }
            for group in (first, second)
        ]
    }
    assert Rollout.objects.filter(state="queued").count() == 5


def test_push_of_a_bare_list(trainer: Caller, experiment: Experiment, task: Task) -> None:
    response = submit(trainer, experiment, [{"task": str(task.pk), "samples": 1}])

    assert response.status_code == 202
    assert Rollout.objects.count() == 1


def test_push_of_inline_tasks(trainer: Caller, experiment: Experiment) -> None:
    environment = factories.make_environment()
    inline = {
        "environment": environment.name,
        "instruction": "  Add 2 and 2.\n",
        "payload": {"setup": "true"},
        "hidden": {"evaluator_payload": {"answer": "4"}},
        "metadata": {"level": 1},
    }

    first = submit(trainer, experiment, [{"inline": inline}, {"inline": inline, "samples": 1}])
    again = submit(trainer, experiment, [{"inline": inline, "samples": 1}])

    assert (first.status_code, again.status_code) == (202, 202)
    task = Task.objects.get(task_set__name=f"inline-{experiment.pk}")
    assert task.environment == environment
    assert task.instruction == "  Add 2 and 2.\n"
    assert task.hidden == {"evaluator_payload": {"answer": "4"}}
    assert (task.payload, task.metadata) == ({"setup": "true"}, {"level": 1})
    assert {group.task_id for group in Group.objects.all()} == {task.pk}
    assert Rollout.objects.count() == 4


MESSAGES = [
    {"role": "user", "content": "  Add 2 and 2."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Look again."},
]


def test_inline_tasks_may_bring_a_conversation(trainer: Caller, experiment: Experiment) -> None:
    inline = {"environment": factories.make_environment().name, "instruction": "Add."}
    given = {**inline, "payload": {"setup": "true"}, "messages": MESSAGES}

    entries = [{"inline": inline, "samples": 1}, {"inline": given}, {"inline": given}]
    response = submit(trainer, experiment, entries)

    assert response.status_code == 202
    plain, first, again = (group.task for group in Group.objects.order_by("sequence"))
    assert plain.payload == {}
    assert first.payload == {"setup": "true", "messages": MESSAGES}
    assert first == again


@pytest.mark.parametrize(
    ("values", "field", "reason"),
    [
        ({"messages": MESSAGES[:2]}, "messages", "the last message is the assistant's"),
        ({"messages": []}, "messages", "messages must be a list with at least one message."),
        ({"messages": ["text"]}, "messages", "Must be an object."),
        ({"messages": "text"}, "messages", "Expected a list of items"),
        ({"payload": {"messages": MESSAGES}}, "payload", "Send messages beside payload"),
    ],
)
def test_a_conversation_that_is_none_is_refused(
    trainer: Caller, experiment: Experiment, values: Any, field: str, reason: str
) -> None:
    inline = {"environment": factories.make_environment().name, "instruction": "Add.", **values}

    response = submit(trainer, experiment, [{"inline": inline}])

    body = assert_problem(response, 400, "request.invalid")
    assert list(body["errors"]["groups"]["0"]["inline"]) == [field]
    assert reason in str(body["errors"]["groups"]["0"]["inline"][field])
    assert (Group.objects.count(), TaskSet.objects.count()) == (0, 1)


def test_inline_task_of_an_unknown_environment(trainer: Caller, experiment: Experiment) -> None:
    inline = {"environment": "moon@2", "instruction": "x"}

    response = submit(trainer, experiment, [{"inline": inline}])

    assert_problem(response, 400, "environment.unknown")
    assert (Group.objects.count(), TaskSet.objects.count()) == (0, 1)


@pytest.mark.parametrize("samples", [0, -1, 1025, 10_000_000, 10**30, "many", None, 1.5])
def test_samples_out_of_bounds(
    trainer: Caller, experiment: Experiment, task: Task, samples: Any
) -> None:
    good = {"task": str(task.pk)}

    response = submit(trainer, experiment, {"groups": [good, {**good, "samples": samples}]})

    body = assert_problem(response, 400, "request.invalid")
    assert list(body["errors"]["groups"]) == ["1"]
    assert list(body["errors"]["groups"]["1"]) == ["samples"]
    assert (Group.objects.count(), Rollout.objects.count()) == (0, 0)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"task": str(uuid4())}, "task.unknown"),
        ({"task_ref": "nothing"}, "task.unknown"),
        ({}, "request.invalid"),
        ({"task_ref": "a", "task": str(uuid4())}, "request.invalid"),
        ({"task": "not-an-id"}, "request.invalid"),
        ({"task_ref": "a", "metadata": []}, "request.invalid"),
        ({"task_ref": "a", "metadata": {"x": "\0"}}, "request.malformed"),
        ({"task_ref": "a", "metadata": {"x\0": [1]}}, "request.malformed"),
        ({"task_ref": "a", "metadata": {"x": "\ud800"}}, "request.malformed"),
        ({"task_ref": "a", "sample": 3}, "request.invalid"),
        ({"inline": {"instruction": "x"}}, "request.invalid"),
        (["task"], "request.invalid"),
    ],
)
def test_one_wrong_entry_refuses_all(
    trainer: Caller, experiment: Experiment, task: Task, entry: Any, code: str
) -> None:
    response = submit(trainer, experiment, [{"task": str(task.pk)}, entry])

    assert_problem(response, 400, code)
    assert (Group.objects.count(), Rollout.objects.count()) == (0, 0)


def test_metadata_with_the_text_of_an_escape_is_kept(
    trainer: Caller, experiment: Experiment, task: Task
) -> None:
    metadata = {"path": "C:\\u0000", "more": ["é", {"n": 1.5}]}

    submit(trainer, experiment, [{"task": str(task.pk), "metadata": metadata}])

    assert Group.objects.get().metadata == metadata


@pytest.mark.parametrize("body", [{"groups": []}, [], {}, {"groups": {}}, {"groups": None}])
def test_no_groups(trainer: Caller, experiment: Experiment, body: Any) -> None:
    assert_problem(submit(trainer, experiment, body), 400, "request.invalid")


def test_too_many_groups(trainer: Caller, experiment: Experiment, task: Task) -> None:
    response = submit(trainer, experiment, [{"task": str(task.pk)}] * 5001)

    assert_problem(response, 400, "request.invalid")
    assert Group.objects.count() == 0


def test_stopped_experiment_accepts_nothing(trainer: Caller, task: Task) -> None:
    experiment = factories.make_experiment(owner=trainer.user, state="stopped")

    response = submit(trainer, experiment, [{"task": str(task.pk)}])

    assert_problem(response, 409, "experiment.stopped")
    assert Group.objects.count() == 0


def test_list_and_detail(trainer: Caller, experiment: Experiment, task: Task) -> None:
    group = factories.make_group(experiment=experiment, task=task, metadata={"step": 1})
    rollouts = [factories.make_rollout(group=group) for _ in range(2)]
    factories.make_group(experiment=factories.make_experiment(owner=trainer.user))
    expected = {
        "id": str(group.pk),
        "experiment": str(experiment.pk),
        "task": str(task.pk),
        "task_ref": task.ref,
        "environment": f"{task.environment.name}@1",
        "state": "open",
        "samples": 2,
        "done": 0,
        "priority": 0,
        "metadata": {"step": 1},
        "snapshot": None,
        "batch": None,
        "filter_rule": "",
        "filter_detail": "",
        "replacements": 0,
        "oldest_version": None,
        "newest_version": None,
        "epoch": None,
        "position": None,
        "created_at": group.created_at.isoformat().replace("+00:00", "Z"),
        "started_at": None,
        "deadline_at": None,
        "ready_at": None,
    }

    listed = trainer.call("GET", f"experiments/{experiment.pk}/groups/").json()
    detail = trainer.call("GET", f"groups/{group.pk}/").json()

    assert listed == {"next": None, "previous": None, "results": [expected]}
    assert detail == {**expected, "rollouts": [str(each.pk) for each in rollouts]}
    assert len(trainer.call("GET", "groups/").json()["results"]) == 2
    assert trainer.call("GET", "groups/?state=ready").json()["results"] == []


def test_cancel_then_cancel_again(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_group(experiment=experiment)
    rollout = factories.make_rollout(group=group)

    response = trainer.call("POST", f"groups/{group.pk}/cancel/")

    assert (response.status_code, response.json()["state"]) == (202, "cancelled")
    rollout.refresh_from_db()
    assert (rollout.state, rollout.outcome) == ("done", "cancelled")
    assert_problem(trainer.call("POST", f"groups/{group.pk}/cancel/"), 409, "group.not_open")


def test_finished_group_is_not_cancelled(trainer: Caller, experiment: Experiment) -> None:
    group = factories.make_ready_group(experiment=experiment)

    assert_problem(trainer.call("POST", f"groups/{group.pk}/cancel/"), 409, "group.not_open")

    group.refresh_from_db()
    assert group.state == "ready"


def filtered_group(experiment: Experiment, rule: str) -> Group:
    return factories.make_ready_group(
        experiment=experiment, state="filtered", filter_rule=rule, ready_at=None
    )


def test_filtered_groups_are_found_and_counted_by_rule(
    trainer: Caller, experiment: Experiment
) -> None:
    first, second = (filtered_group(experiment, "no_variance") for _each in range(2))
    other = filtered_group(experiment, "too_stale")
    factories.make_ready_group(experiment=experiment)
    at = f"experiments/{experiment.pk}/groups"

    listed = trainer.call("GET", f"{at}/?state=filtered&rule=no_variance").json()["results"]
    counts = trainer.call("GET", f"{at}/counts/").json()

    assert {each["id"] for each in listed} == {str(first.pk), str(second.pk)}
    assert {each["filter_rule"] for each in listed} == {"no_variance"}
    assert trainer.call("GET", "groups/?rule=too_stale").json()["results"][0]["id"] == str(other.pk)
    assert counts == {
        "states": {
            **{"open": 0, "ready": 1, "leased": 0, "consumed": 0, "filtered": 3, "cancelled": 0}
        },
        "rules": {"no_variance": 2, "too_stale": 1},
    }


def test_what_was_filtered_can_be_read(trainer: Caller, experiment: Experiment) -> None:
    group = filtered_group(experiment, "no_variance")

    whole = trainer.call("GET", f"groups/{group.pk}/trajectories/")
    lines = trainer.call("GET", f"groups/{group.pk}/trajectories/", Accept="application/x-ndjson")

    body = json.loads(b"".join(whole.streaming_content))
    assert (body["id"], body["state"]) == (str(group.pk), "filtered")
    assert body["filter_rule"] == "no_variance"
    assert [each["sample"] for each in body["trajectories"]] == [0, 1]
    assert [each["reward"] for each in body["trajectories"]] == [1.0, 0.0]
    assert body["trajectories"][0]["segments"][0]["response_ids"] == [11, 12]
    read = b"".join(lines.streaming_content).splitlines()
    assert [json.loads(line) for line in read] == body["trajectories"]
    assert lines["Content-Type"] == "application/x-ndjson"
    group.refresh_from_db()
    assert group.state == "filtered"


def test_only_what_is_finished_and_was_not_replaced_is_read(
    trainer: Caller, experiment: Experiment
) -> None:
    group = factories.make_group(experiment=experiment, size=2)
    factories.make_scored_rollout(group=group)
    factories.make_scored_rollout(group=group, replaced=True)
    factories.make_rollout(group=group)

    response = trainer.call("GET", f"groups/{group.pk}/trajectories/")

    body = json.loads(b"".join(response.streaming_content))
    assert [each["sample"] for each in body["trajectories"]] == [0]


def test_another_trainers_groups_are_not_there(trainer: Caller) -> None:
    group = filtered_group(factories.make_experiment(), "no_variance")

    for path in (
        f"groups/{group.pk}/trajectories/",
        f"experiments/{group.experiment_id}/groups/counts/",
    ):
        assert trainer.call("GET", path).status_code == 404
