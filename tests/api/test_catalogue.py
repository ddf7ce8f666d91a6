"""Task sets, environments, images, nodes and sandboxes over HTTP."""

from typing import Any
from uuid import uuid4

import pytest

from rollouts.services.inline import InlineTask, add_inline_tasks
from sandboxes.models import Environment, Image, Node
from tests import factories
from tests.api.callers import Caller, assert_problem


def test_task_sets_and_their_tasks(trainer: Caller) -> None:
    task_set = factories.make_task_set(description="Sums.")
    tasks = [factories.make_task(task_set=task_set) for _ in range(2)]
    factories.make_task()

    listed = trainer.call("GET", "task-sets/").json()["results"]
    detail = trainer.call("GET", f"task-sets/{task_set.pk}/").json()
    response = trainer.call("GET", f"task-sets/{task_set.pk}/tasks/")

    assert len(listed) == 2
    assert detail in listed
    assert (detail["name"], detail["task_count"]) == (task_set.name, 2)
    found = response.json()["results"]
    assert {each["ref"] for each in found} == {task.ref for task in tasks}
    assert found[0]["instruction"] == "Say hello."
    assert b"hidden" not in response.content
    assert b"evaluator_payload" not in response.content


def test_tasks_of_a_set_that_is_not_there(trainer: Caller) -> None:
    assert_problem(trainer.call("GET", f"task-sets/{uuid4()}/tasks/"), 404, "not_found")


def test_inline_tasks_are_seen_by_the_experiments_owner_only(
    trainer: Caller, stranger: Caller
) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    environment = factories.make_environment()
    (task,) = add_inline_tasks(
        experiment=experiment,
        tasks=[InlineTask(environment=environment.name, instruction="x")],
    )

    own = trainer.call("GET", "task-sets/").json()["results"]

    assert [each["id"] for each in own] == [str(task.task_set_id)]
    assert stranger.call("GET", "task-sets/").json()["results"] == []
    path = f"task-sets/{task.task_set_id}/tasks/"
    assert trainer.call("GET", path).status_code == 200
    assert_problem(stranger.call("GET", path), 404, "not_found")


def test_image_is_registered_by_operators_only(trainer: Caller, operator: Caller) -> None:
    given = {"name": "base", "source": "base.sif"}

    assert_problem(trainer.call("POST", "images/", given), 403, "auth.forbidden")
    assert Image.objects.count() == 0
    created = operator.call("POST", "images/", given)

    assert created.status_code == 201
    assert (created.json()["name"], created.json()["state"]) == ("base", "unchecked")
    assert trainer.call("GET", "images/").json()["results"] == [created.json()]


def test_environment_gets_a_version_for_each_change(trainer: Caller, operator: Caller) -> None:
    image = factories.make_image()
    given = {"name": "shell", "image": image.name, "setup": "mkdir -p /app\n", "tools": ["bash"]}

    first = operator.call("POST", "environments/", given)
    same = operator.call("POST", "environments/", given)
    changed = operator.call("POST", "environments/", {**given, "image": str(image.pk), "setup": ""})

    assert first.status_code == 201
    assert first.json()["ref"] == "shell@1"
    assert (first.json()["image"], first.json()["setup"]) == (image.name, "mkdir -p /app\n")
    assert same.json() == first.json()
    assert changed.json()["ref"] == "shell@2"
    refs = [each["ref"] for each in trainer.call("GET", "environments/").json()["results"]]
    assert refs == ["shell@2", "shell@1"]
    latest = trainer.call("GET", "environments/?latest=true").json()["results"]
    assert [each["ref"] for each in latest] == ["shell@2"]
    one = trainer.call("GET", f"environments/{first.json()['id']}/").json()
    assert one == first.json()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Shell"}, "name"),
        ({"image": "nothing"}, "image"),
        ({"agent": "nobody"}, "agent"),
        ({"evaluator": "nobody"}, "evaluator"),
        ({"tools": ["bash", "hammer"]}, "tools"),
        ({"network": "all"}, "network"),
        ({"workdir": "app"}, "workdir"),
        ({"limits": [1]}, "limits"),
        ({"limits": {"cpu": 1}}, "limits"),
        ({"limits": {"cpus": 0}}, "limits"),
        ({"limits": {"processes": True}}, "limits"),
        ({"network": "allow_list", "egress_hosts": "pypi.org"}, "egress_hosts"),
        ({"network": "allow_list", "egress_hosts": ["http://pypi.org"]}, "egress_hosts"),
        ({"network": "allow_list", "egress_hosts": ["pypi.org:0"]}, "egress_hosts"),
        ({"network": "allow_list", "egress_hosts": ["x.org"] * 201}, "egress_hosts"),
        ({"network": "model_only", "egress_hosts": ["pypi.org"]}, "egress_hosts"),
        ({"egress_hosts": ["pypi.org"]}, "egress_hosts"),
        ({"gpu": "tpu"}, "gpu"),
        ({"warm": -1}, "warm"),
        ({"warm": 257}, "warm"),
        ({"version": 3}, "version"),
    ],
)
def test_environment_refuses(operator: Caller, change: dict[str, Any], field: str) -> None:
    response = operator.call("POST", "environments/", {"name": "shell", **change})

    body = assert_problem(response, 400, "request.invalid")
    assert list(body["errors"]) == [field]
    assert Environment.objects.count() == 0


def test_environment_with_listed_hosts_gpu_and_warmth(operator: Caller) -> None:
    given = {
        "network": "allow_list",
        "egress_hosts": ["pypi.org", "*.example.org:8443", "10.0.0.5"],
        "gpu": "nvidia",
        "warm": 3,
        "limits": {"cpus": 0.5, "memory_bytes": 1024},
    }

    response = operator.call("POST", "environments/", {"name": "wide", **given})

    assert response.status_code == 201
    assert {name: response.json()[name] for name in given} == given
    saved = Environment.objects.get()
    assert {name: getattr(saved, name) for name in given} == given


def test_another_list_gpu_or_warmth_is_another_version(operator: Caller) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"network": "allow_list", "egress_hosts": ["pypi.org"]},
        {"gpu": "rocm"},
        {"warm": 1},
    ]

    refs = [
        operator.call("POST", "environments/", {"name": "wide", **each}).json()["ref"]
        for each in changes
        for _ in range(2)
    ]

    assert refs == [f"wide@{version}" for version in (1, 1, 2, 2, 3, 3, 4, 4)]


def test_environment_is_not_changed_by_trainers(trainer: Caller) -> None:
    response = trainer.call("POST", "environments/", {"name": "shell"})

    assert_problem(response, 403, "auth.forbidden")
    assert Environment.objects.count() == 0


def test_node_is_drained_and_resized(operator: Caller) -> None:
    node = factories.make_node(capacity=4)
    factories.make_sandbox(node=node)

    response = operator.call("PATCH", f"nodes/{node.pk}/", {"draining": True, "capacity": 0})

    assert response.status_code == 200
    assert response.json() == {
        "id": str(node.pk),
        "name": node.name,
        "capacity": 0,
        "slots_used": 1,
        "draining": True,
        "enforcement": {},
        "leaked": 0,
        "seen_at": None,
        "created_at": node.created_at.isoformat().replace("+00:00", "Z"),
    }
    assert operator.call("GET", "nodes/").json()["results"] == [response.json()]


@pytest.mark.parametrize("body", [{"capacity": -1}, {"capacity": 2**31}, {"name": "other"}])
def test_node_refuses(operator: Caller, body: dict[str, Any]) -> None:
    node = factories.make_node()

    response = operator.call("PATCH", f"nodes/{node.pk}/", {"draining": True, **body})

    assert_problem(response, 400, "request.invalid")
    assert Node.objects.get().draining is False


def test_node_is_not_changed_by_trainers(make_caller: Any) -> None:
    node = factories.make_node()
    caller = make_caller(scopes=["read", "submit", "policy", "operate"])

    response = caller.call("PATCH", f"nodes/{node.pk}/", {"draining": True})

    assert_problem(response, 403, "auth.forbidden")
    assert Node.objects.get().draining is False


def test_sandboxes(operator: Caller) -> None:
    sandbox = factories.make_sandbox(handle={"secret": 1})
    factories.make_sandbox()

    found = operator.call("GET", f"sandboxes/?rollout={sandbox.owner}").json()["results"]

    assert [each["id"] for each in found] == [str(sandbox.pk)]
    assert found[0]["node"] == sandbox.node.name
    assert "handle" not in found[0]
    assert len(operator.call("GET", "sandboxes/?state=reserved").json()["results"]) == 2
