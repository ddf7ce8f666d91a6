"""The rest of the calls over the service's own API."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any
from uuid import uuid4

import pytest
from prorl_client import (
    AuthError,
    Client,
    Conflict,
    Experiment,
    InlineTask,
    InvalidRequest,
    NotFound,
)
from prorl_client.cli.main import main

from rollouts.models import Experiment as ExperimentRow
from rollouts.models import Group, PolicyUpdate
from tests import factories
from tests.api.callers import Caller
from tests.clients.conftest import PLAIN, QUICK
from tests.clients.live.line import playing
from tests.clients.live.test_batches import make_ready


def test_experiment_is_made_once_for_one_key(client: Client) -> None:
    policy = factories.make_policy()

    made = [
        client.create_experiment("once", policy.name, group_size=4, idempotency_key="k")
        for _ in range(2)
    ]

    assert made[0] == made[1]
    assert ExperimentRow.objects.get(name="once").group_size == 4
    assert [each.id for each in client.experiments(name="once")] == [made[0].id]


def test_tasks_are_submitted_once_for_one_key(client: Client, experiment: Experiment) -> None:
    tasks = factories.make_task_set()
    environment = factories.make_environment()
    refs = [factories.make_task(task_set=tasks, environment=environment).ref for _ in range(2)]
    row = ExperimentRow.objects.get(pk=experiment.id)
    row.task_sets.set([tasks])
    inline = InlineTask(environment=environment.name, instruction="Go.", hidden={"a": 1})

    first = experiment.submit([*refs, inline], samples=3, idempotency_key="k")
    second = experiment.submit([*refs, inline], samples=3, idempotency_key="k")

    assert [each.id for each in first] == [each.id for each in second]
    assert Group.objects.count() == 3
    assert [len(each.rollouts) for each in first] == [3, 3, 3]
    found = first[0].refresh()
    assert (found.task_ref, found.state, found.samples) == (refs[0], "open", 3)
    assert found.cancel().state == "cancelled"
    assert first[0].wait(timeout=10).state == "cancelled"
    with pytest.raises(Conflict):
        found.cancel()
    assert len(list(experiment.rollouts(group=first[1].id))) == 3


def test_refusals(client: Client, experiment: Experiment, address: str) -> None:
    with pytest.raises(NotFound) as missing:
        client.experiment(str(uuid4()))
    assert missing.value.code == "not_found"
    with pytest.raises(NotFound):
        client.rollout("no-id")
    with pytest.raises(InvalidRequest) as unknown:
        experiment.submit(["no-such-task"])
    assert unknown.value.code == "task.unknown"
    with pytest.raises(InvalidRequest, match=r"group_size: .*1"):
        experiment.change(group_size=0)
    with (
        Client(address, "wrong", retries=QUICK, http_options=PLAIN) as stranger,
        pytest.raises(AuthError, match="Ask an operator"),
    ):
        stranger.experiment(experiment.id)


def test_pages_of_a_long_list(
    client: Client, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_client._sync.client.PAGE_SIZE", 2)
    made = [make_ready(experiment) for _ in range(5)]

    found = [each.id for each in experiment.groups(state="ready")]

    assert sorted(found) == sorted(str(each.pk) for each in made)


def test_filtered_groups_can_be_read(client: Client, experiment: Experiment) -> None:
    group = make_ready(experiment, rewards=[1.0, 1.0])
    Group.objects.update(state="filtered", filter_rule="all_right")

    (found,) = experiment.groups(state="filtered")

    assert (found.id, found.filter_rule) == (str(group.pk), "all_right")
    trajectories = found.trajectories()
    assert [each.reward for each in trajectories] == [1.0, 1.0]
    assert trajectories[0].messages == ({"role": "user", "content": "Say hello."},)


@pytest.mark.broker
def test_update_of_a_policy(client: Client, experiment: Experiment) -> None:
    policy = client.policy(experiment.policy)

    with policy.update(4, mode="abort") as update:
        assert PolicyUpdate.objects.get().state == "ready"
        assert update.to_version == 4
    assert PolicyUpdate.objects.get().state == "completed"
    assert experiment.refresh().policy_version == 4

    with pytest.raises(ZeroDivisionError), policy.update(5, mode="none"):
        raise ZeroDivisionError
    states = list(PolicyUpdate.objects.order_by("number").values_list("state", "detail"))
    assert states == [("completed", ""), ("abandoned", "ZeroDivisionError")]
    assert policy.refresh().version == 4
    assert [each.number for each in policy.updates()] == [2, 1]
    with pytest.raises(Conflict) as older, policy.update(4):
        pytest.fail("the body must not run")
    assert older.value.code == "policy.version_not_newer"


def test_servers(client: Client, experiment: Experiment) -> None:
    added = client.add_server(experiment.policy, "http://127.0.0.1:9", kind="vllm")

    assert [each.id for each in client.servers(policy=experiment.policy)] == [added.id]
    client.remove_server(added.id)
    assert client.clear_servers(experiment.policy) in (0, 1)


@pytest.mark.broker
def test_evaluation(client: Client, experiment: Experiment) -> None:
    tasks = factories.make_task_set()
    factories.make_task(task_set=tasks)
    with playing():
        begun = [
            client.evaluate("v", experiment.policy, [tasks.name], samples_per_task=2, seed=seed)
            for seed in (1, 2)
        ]
        first, second = [each.wait(timeout=120) for each in begun]

    assert (first.overall["samples"], first.overall["right"]) == (2, 1)
    assert first.overall["pass_at"]["1"]["value"] == 0.5
    assert first.compare(second)["tasks"] == 1


@pytest.mark.broker
def test_events_of_a_lease(client: Client, experiment: Experiment) -> None:
    kinds = ["batch.leased", "batch.acknowledged"]
    make_ready(experiment)
    experiment.lease(groups=1).ack()

    events = list(islice(experiment.events("0-0", kinds=kinds), 2))

    assert [each.kind for each in events] == kinds
    assert {each.experiment for each in events} == {experiment.id}


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    address: str,
    trainer: Caller,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return a function that runs a command and returns its status and what it printed."""
    monkeypatch.setenv("PRORL_URL", address)
    monkeypatch.setenv("PRORL_TOKEN", trainer.text)

    def call(*words: str) -> tuple[int, str]:
        status = main(list(words))
        return status, capsys.readouterr().out

    return call


def test_commands(run: Run, experiment: Experiment) -> None:
    group = make_ready(experiment)
    batch = experiment.lease(groups=1)
    rollout = batch.trajectories[0].rollout
    task_set = group.task.task_set

    def rows(*words: str) -> list[Any]:
        status, printed = run("--json", *words)
        assert status == 0
        return [json.loads(line) for line in printed.splitlines()]

    assert [each["name"] for each in rows("experiments")] == ["live"]
    assert rows("watch", "live", "--once")[0]["rollouts"]["done"] == 2
    assert [each["state"] for each in rows("batches", "live")] == ["leased"]
    assert [each["name"] for each in rows("tasks", "list")] == [task_set.name]
    assert [each["ref"] for each in rows("tasks", "list", task_set.name)] == [group.task.ref]
    (shown,) = rows("trajectory", "show", rollout)
    assert shown["segments"][0]["response_tokens"] == 2
    assert run("cancel", "rollout", rollout)[0] == 5
    assert rows("cancel", "experiment", "live") == [
        {"id": "live", "state": "stopped, 0 rollouts cancelled"}
    ]
    assert rows("servers") == []


def test_import_of_tasks(run: Run, experiment: Experiment, tmp_path: Any) -> None:
    environment = factories.make_environment()
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"ref": "a", "instruction": "1+1?", "answer": "2"}))

    status, _out = run(
        "tasks", "import", str(file), "--experiment", "live", "--environment", environment.name
    )

    assert status == 0
    task = Group.objects.get().task
    assert task.hidden == {"evaluator_payload": {"answer": "2"}}
    assert (task.instruction, task.metadata) == ("1+1?", {"ref": "a"})
