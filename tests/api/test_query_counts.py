"""The number of queries of a call does not grow with the rows, and is written down."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollouts.models import Evaluation, Reevaluation
from sandboxes.models import Snapshot
from tests import factories
from tests.api.callers import Caller

BASELINE = Path(__file__).with_name("query_counts.json")


@pytest.fixture
def world(operator: Caller) -> Callable[[], dict[str, Any]]:
    """Return a function that adds one of everything, each with parents of its own."""
    root = factories.make_experiment(owner=operator.user)

    def grow() -> dict[str, Any]:
        tasks = factories.make_task()
        experiment = factories.make_experiment(owner=operator.user, task_sets=[tasks.task_set])
        for owner in (root, experiment):
            factories.make_batch(groups=[factories.make_ready_group(experiment=owner)])
            factories.make_rollout(
                group=factories.make_group(experiment=owner), node=factories.make_node()
            )
        if "rollout" not in shown:
            shown["rollout"] = factories.make_scored_rollout(
                group=factories.make_group(experiment=root)
            )
            factories.make_trajectory(rollout=shown["rollout"])
            shown["batch"] = factories.make_batch(
                groups=[factories.make_ready_group(experiment=root)]
            )
            shown["tasks"] = tasks
        worker = factories.make_worker()
        factories.make_attempt(
            rollout=shown["rollout"],
            number=shown["rollout"].attempts.count() + 1,
            state="lost",
            worker=worker,
            node=worker.node,
            ended_at=root.created_at,
        )
        factories.make_task(task_set=shown["tasks"].task_set)
        factories.make_server()
        if "update" not in shown:
            shown["update"] = factories.make_policy_update()
        factories.make_policy_update(
            policy=shown["update"].policy, state="abandoned", ended_at=root.created_at
        )
        factories.make_sandbox()
        shown["snapshot"] = Snapshot.objects.create(
            owner=shown["rollout"].pk, environment=factories.make_environment()
        )
        factories.make_environment(image=factories.make_image())
        if "image" not in shown:
            shown["image"] = factories.make_image()
        factories.make_image_build(image=shown["image"], requested_by=operator.user)
        factories.make_image_build()
        if "import" not in shown:
            shown["import"] = factories.make_task_import()
            shown["verification"] = factories.make_verification()
        factories.make_rejected_row(
            task_import=shown["import"], number=shown["import"].rejected_rows.count() + 1
        )
        factories.make_task_import()
        factories.make_verification()
        Evaluation.objects.create(rollout=shown["rollout"], evaluator="exact")
        shown["again"] = Reevaluation.objects.create(
            owner=operator.user,
            experiment=root,
            evaluator="exact",
            state="done",
            ended_at=root.created_at,
        )
        return {"root": root, **shown}

    shown: dict[str, Any] = {}
    return grow


def paths(rows: dict[str, Any]) -> dict[str, str]:
    """Return a name and an address for each call that reads."""
    root, rollout, batch = (rows[name].pk for name in ("root", "rollout", "batch"))
    lists = (
        *("experiments", "groups", "batches", "rollouts", "policies", "inference-servers"),
        *("task-sets", "environments", "images", "image-builds", "nodes", "sandboxes"),
        *("task-sets/imports", "verifications", "evaluations"),
    )
    return {
        **{f"{name}/": f"{name}/" for name in lists},
        "experiments/{id}/": f"experiments/{root}/",
        "experiments/{id}/groups/": f"experiments/{root}/groups/",
        "experiments/{id}/batches/": f"experiments/{root}/batches/",
        "policies/{id}/updates/": f"policies/{rows['update'].policy_id}/updates/",
        "policies/{id}/updates/{n}/": f"policies/{rows['update'].policy_id}/updates/1/",
        "rollouts/{id}/": f"rollouts/{rollout}/",
        "rollouts/{id}/attempts/": f"rollouts/{rollout}/attempts/",
        "rollouts/{id}/trajectory/": f"rollouts/{rollout}/trajectory/",
        "rollouts/{id}/snapshots/": f"rollouts/{rollout}/snapshots/",
        "snapshots/{id}/": f"snapshots/{rows['snapshot'].pk}/",
        "groups/{id}/": f"groups/{rows['rollout'].group_id}/",
        "batches/{id}/": f"batches/{batch}/",
        "images/{id}/": f"images/{rows['image'].pk}/",
        "images/{id}/builds/": f"images/{rows['image'].pk}/builds/",
        "image-builds/{id}/": f"image-builds/{rows['image'].builds.latest('created_at').pk}/",
        "task-sets/imports/{id}/rejected/": f"task-sets/imports/{rows['import'].pk}/rejected/",
        "verifications/{id}/": f"verifications/{rows['verification'].pk}/",
        "rollouts/{id}/evaluations/": f"rollouts/{rollout}/evaluations/",
        "reevaluations/{id}/": f"reevaluations/{rows['again'].pk}/",
        "experiments/{id}/reevaluations/": f"experiments/{root}/reevaluations/",
        "task-sets/{id}/tasks/": f"task-sets/{rows['tasks'].task_set_id}/tasks/",
    }


def count(caller: Caller, path: str) -> int:
    with CaptureQueriesContext(connection) as queries:
        response = caller.call("GET", path)
        if response.streaming:
            list(response.streaming_content)
    assert response.status_code == 200, path
    return len(queries)


def test_counts_do_not_grow_and_are_as_written_down(
    operator: Caller, world: Callable[[], dict[str, Any]]
) -> None:
    rows = world()
    operator.call("GET", "policies/")  # notes the token's use, once a minute
    few = {name: count(operator, path) for name, path in paths(rows).items()}
    for _ in range(4):
        world()
    many = {name: count(operator, path) for name, path in paths(rows).items()}

    assert many == few
    assert many == json.loads(BASELINE.read_text()), "write the new counts down if they are meant"
