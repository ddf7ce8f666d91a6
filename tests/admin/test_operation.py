"""Nodes, inference servers, batches, tasks and workers."""

import json

import pytest

from rollouts.models import Batch, Group, InferenceServer, Task, Worker
from sandboxes.models import Node
from tests.admin.factories import (
    make_batch,
    make_environment,
    make_node,
    make_policy,
    make_sandbox,
    make_server,
    make_task,
    make_worker,
)

pytestmark = pytest.mark.django_db


def test_drain_and_undrain_tell_what_they_did(operator) -> None:
    used, drained = make_node(), make_node(draining=True)

    assert operator.act(Node, "drain", used, drained) == (
        f"Drain: 1 done, 1 skipped, 0 failed. {drained}: is drained already."
    )
    assert operator.act(Node, "undrain", used) == "Undrain: 1 done, 0 skipped, 0 failed."
    used.refresh_from_db()
    drained.refresh_from_db()
    assert (used.draining, drained.draining) == (False, True)


def test_editing_a_node_keeps_what_its_workers_wrote_meanwhile(operator) -> None:
    from django.utils import timezone

    node, now = make_node(capacity=4), timezone.now()
    operator.get(Node, "change", node.pk)
    Node.objects.filter(pk=node.pk).update(seen_at=now)

    operator.post(Node, "change", {"capacity": 9}, node.pk)

    node.refresh_from_db()
    assert (node.capacity, node.seen_at) == (9, now)


def test_the_list_of_nodes_counts_owners_that_hold_a_slot(operator) -> None:
    node = make_node()
    first = make_sandbox(node=node)
    make_sandbox(node=node, owner=first.owner, purpose="grade")
    make_sandbox(node=node)

    row = operator.get(Node).context["cl"].queryset.get(pk=node.pk)

    assert row.slots_used == 2


def test_a_server_is_registered_by_its_base_address(operator) -> None:
    policy = make_policy()
    form = {"policy": policy.pk, "url": "http://gpu-1:8000/v1/", "kind": "vllm", "max_in_flight": 8}

    operator.post(InferenceServer, "add", {**form, "state": "active"})
    operator.post(InferenceServer, "add", {**form, "max_in_flight": 32, "state": "active"})

    server = InferenceServer.objects.get()
    assert (server.url, server.kind, server.max_in_flight) == ("http://gpu-1:8000", "vllm", 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "oracle"), ("url", "ftp://gpu-1/"), ("url", "gpu-1"), ("max_in_flight", 0)],
)
def test_a_server_that_cannot_be_spoken_to_is_refused(operator, field, value) -> None:
    form = {
        "policy": make_policy().pk,
        "url": "http://gpu-1:8000",
        "kind": "vllm",
        "max_in_flight": 8,
        field: value,
    }

    answer = operator.post(InferenceServer, "add", form)

    assert list(answer.context["adminform"].form.errors) == [field]
    assert not InferenceServer.objects.exists()


def test_servers_are_removed_by_state_and_never_deleted(operator) -> None:
    server = make_server()

    assert operator.post(InferenceServer, "delete", {"post": "yes"}, server.pk).status_code == 403
    assert operator.act(InferenceServer, "remove", server) == "Remove: 1 done, 0 skipped, 0 failed."
    assert operator.act(InferenceServer, "remove", server) == (
        f"Remove: 0 done, 1 skipped, 0 failed. {server}: There is no such inference server."
    )
    server.refresh_from_db()
    assert server.state == "removed"


def test_returning_a_batch_lets_its_groups_be_leased_again(operator) -> None:
    leased, gone = make_batch(), make_batch()
    Batch.objects.filter(pk=gone.pk).update(state="acknowledged", closed_at=gone.created_at)
    group = Group.objects.get(batch=leased)

    said = operator.act(Batch, "give_back", leased, gone)

    assert said == (
        f"Return: 1 done, 1 skipped, 0 failed. {gone}: The batch is acknowledged; only a leased "
        f"one can be returned."
    )
    leased.refresh_from_db()
    group.refresh_from_db()
    assert (leased.state, group.state, group.batch) == ("returned", "ready", None)


def form_of_task(task: Task, **changes: object) -> dict[str, object]:
    return {
        "task_set": task.task_set_id,
        "ref": task.ref,
        "environment": task.environment_id,
        "instruction": task.instruction,
        "payload": json.dumps(task.payload),
        "hidden": json.dumps(task.hidden),
        "metadata": json.dumps(task.metadata),
        **changes,
    }


def test_an_edited_task_differs_from_what_was_imported(operator) -> None:
    task, environment = make_task(), make_environment()
    form = form_of_task(task, instruction="Do it well.", environment=environment.pk)

    operator.post(Task, "change", form, task.pk)

    before = task.content_hash
    task.refresh_from_db()
    assert (task.instruction, task.environment) == ("Do it well.", environment)
    assert task.content_hash != before
    assert len(task.content_hash) == 64


def test_a_task_whose_payload_is_no_object_is_refused(operator) -> None:
    task = make_task()

    answer = operator.post(Task, "change", form_of_task(task, payload="[]"), task.pk)

    assert answer.context["adminform"].form.errors["payload"] == ["It must be a JSON object."]


def test_the_list_of_workers_tells_the_living_from_the_dead(operator) -> None:
    from django.utils import timezone

    (
        make_worker(),
        make_worker(lease_expires_at=timezone.now()),
        make_worker(ended_at=timezone.now()),
    )

    page = operator.get(Worker).content.decode()

    assert page.count('alt="True"') == 1
    assert page.count('alt="False"') == 2
