"""Another trainer's things are not there, and nothing about them changes."""

from typing import Any

import pytest

from rollouts.models import Batch, Experiment, Group, Rollout
from sandboxes.models import Snapshot
from tests import factories
from tests.api.callers import Caller, assert_problem

CALLS = [
    ("GET", "experiments/{experiment}/", None),
    ("PATCH", "experiments/{experiment}/", {"name": "mine"}),
    ("POST", "experiments/{experiment}/pause/", None),
    ("POST", "experiments/{experiment}/resume/", None),
    ("POST", "experiments/{experiment}/stop/", None),
    ("GET", "experiments/{experiment}/groups/", None),
    ("POST", "experiments/{experiment}/groups/", [{"task": "{task}"}]),
    ("GET", "experiments/{experiment}/batches/", None),
    ("POST", "experiments/{experiment}/batches/", {"groups": 1}),
    ("GET", "groups/{group}/", None),
    ("POST", "groups/{group}/cancel/", None),
    ("GET", "batches/{batch}/", None),
    ("POST", "batches/{batch}/ack/", None),
    ("POST", "batches/{batch}/nack/", None),
    ("POST", "batches/{batch}/extend/", {"seconds": 60}),
    ("GET", "rollouts/{rollout}/", None),
    ("GET", "rollouts/{rollout}/attempts/", None),
    ("GET", "rollouts/{rollout}/trajectory/", None),
    ("POST", "rollouts/{rollout}/cancel/", None),
    ("GET", "rollouts/{rollout}/snapshots/", None),
    ("POST", "rollouts/{rollout}/snapshots/", {"turn": 1}),
    ("GET", "snapshots/{snapshot}/", None),
    ("DELETE", "snapshots/{snapshot}/", None),
]


@pytest.fixture
def ids(trainer: Caller) -> dict[str, str]:
    """Return the ids of one trainer's things: an open group, a finished one and a leased one."""
    experiment = factories.make_experiment(owner=trainer.user)
    group = factories.make_group(experiment=experiment)
    rollout = factories.make_rollout(group=group)
    factories.make_ready_group(experiment=experiment)
    batch = factories.make_batch(groups=[factories.make_ready_group(experiment=experiment)])
    rows = {
        "experiment": experiment,
        "task": group.task,
        "group": group,
        "rollout": rollout,
        "batch": batch,
        "snapshot": Snapshot.objects.create(owner=rollout.pk, environment=rollout.environment),
    }
    return {name: str(row.pk) for name, row in rows.items()}


def everything() -> list[Any]:
    models = (Experiment, Group, Rollout, Batch, Snapshot)
    return [list(model.objects.order_by("pk").values()) for model in models]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_another_trainers_thing_is_not_there(
    stranger: Caller, ids: dict[str, str], method: str, path: str, body: Any
) -> None:
    before = everything()
    if isinstance(body, list):
        body = [{"task": ids["task"]}]

    response = stranger.call(method, path.format(**ids), body)

    assert_problem(response, 404, "not_found")
    assert everything() == before


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_token_bound_elsewhere_does_not_reach_it_either(
    trainer: Caller, make_caller: Any, ids: dict[str, str], method: str, path: str, body: Any
) -> None:
    other = factories.make_experiment(owner=trainer.user)
    caller = make_caller(trainer.user, experiments=[other])
    before = everything()
    if isinstance(body, list):
        body = [{"task": ids["task"]}]

    response = caller.call(method, path.format(**ids), body)

    assert_problem(response, 404, "not_found")
    assert everything() == before


@pytest.mark.parametrize("path", ["experiments/", "groups/", "batches/", "rollouts/"])
def test_lists_hold_ones_own_only(
    trainer: Caller, stranger: Caller, operator: Caller, ids: dict[str, str], path: str
) -> None:
    assert trainer.call("GET", path).json()["results"] != []
    assert stranger.call("GET", path).json()["results"] == []
    assert operator.call("GET", path).json() == trainer.call("GET", path).json()


@pytest.mark.parametrize("path", ["groups/", "batches/", "rollouts/"])
def test_filter_does_not_open_another_trainers_experiment(
    stranger: Caller, ids: dict[str, str], path: str
) -> None:
    response = stranger.call("GET", f"{path}?experiment={ids['experiment']}")

    assert response.json()["results"] == []
