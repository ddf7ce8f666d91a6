"""Policies and inference servers over HTTP."""

from typing import Any

import pytest
from django.utils.timezone import now

from rollouts.models import InferenceServer, Policy, Rollout
from rollouts.states import Outcome, RolloutState
from tests import factories
from tests.api.callers import Caller, assert_problem


def test_create_list_detail_patch(trainer: Caller) -> None:
    given = {"name": "tiny", "model": "tiny-135m", "tokenizer": "/models/tiny"}

    created = trainer.call("POST", "policies/", given)

    policy = Policy.objects.get()
    expected = {
        "id": str(policy.pk),
        **given,
        "context_tokens": 2048,
        "version": 0,
        "alarm": "",
        "created_at": policy.created_at.isoformat().replace("+00:00", "Z"),
    }
    assert (created.status_code, created.json()) == (201, expected)
    assert trainer.call("GET", "policies/").json()["results"] == [expected]
    assert trainer.call("GET", f"policies/{policy.pk}/").json() == expected
    patched = trainer.call("PATCH", f"policies/{policy.pk}/", {"version": 4})
    assert patched.json() == {**expected, "version": 4}


def test_name_that_is_taken(trainer: Caller) -> None:
    first, second = factories.make_policy(), factories.make_policy()
    given = {"name": first.name, "model": "m", "tokenizer": "t"}

    assert_problem(trainer.call("POST", "policies/", given), 409, "policy.exists")
    response = trainer.call("PATCH", f"policies/{second.pk}/", {"name": first.name})

    assert_problem(response, 409, "policy.exists")
    assert set(Policy.objects.values_list("name", flat=True)) == {first.name, second.name}


@pytest.mark.parametrize(
    "change",
    [{"name": "Tiny One"}, {"context_tokens": 15}, {"version": -1}, {"version": 2**63}, {"x": 1}],
)
def test_policy_refuses(trainer: Caller, change: dict[str, Any]) -> None:
    given = {"name": "tiny", "model": "m", "tokenizer": "t", **change}

    body = assert_problem(trainer.call("POST", "policies/", given), 400, "request.invalid")

    assert list(body["errors"]) == list(change)
    assert Policy.objects.count() == 0


def test_register_list_remove(trainer: Caller) -> None:
    policy = factories.make_policy()
    given = {"policy": policy.name, "url": "http://127.0.0.1:8000/v1/", "max_in_flight": 4}

    created = trainer.call("POST", "inference-servers/", given)

    server = InferenceServer.objects.get()
    assert created.status_code == 201
    assert created.json() == {
        "id": str(server.pk),
        "policy": policy.name,
        "url": "http://127.0.0.1:8000",
        "kind": "vllm",
        "max_in_flight": 4,
        "state": "active",
        "healthy": None,
        "detail": "",
        "checked_at": None,
        "created_at": server.created_at.isoformat().replace("+00:00", "Z"),
    }
    assert trainer.call("GET", "inference-servers/").json()["results"] == [created.json()]
    removed = trainer.call("DELETE", f"inference-servers/{server.pk}/")
    assert (removed.status_code, removed.content) == (204, b"")
    assert trainer.call("GET", "inference-servers/").json()["results"] == []
    again = trainer.call("DELETE", f"inference-servers/{server.pk}/")
    assert_problem(again, 404, "not_found")


def test_registering_twice_is_one_server(trainer: Caller) -> None:
    policy = factories.make_policy()
    given = {"policy": str(policy.pk), "url": "http://127.0.0.1:8000", "kind": "vllm"}

    ids = {trainer.call("POST", "inference-servers/", given).json()["id"] for _ in range(2)}

    assert ids == {str(InferenceServer.objects.get().pk)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy": "nobody"}, "policy"),
        ({"url": "ftp://127.0.0.1"}, "url"),
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"url": "http://user:secret@127.0.0.1"}, "url"),
        ({"url": "http://127.0.0.1:99999"}, "url"),
        ({"url": "http://127.0.0.1/?key=secret"}, "url"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"kind": "oracle"}, None),
        ({"model": "m"}, "model"),
    ],
)
def test_server_refuses(trainer: Caller, change: dict[str, Any], named: str | None) -> None:
    given = {"policy": factories.make_policy().name, "url": "http://127.0.0.1:8000", **change}

    response = trainer.call("POST", "inference-servers/", given)

    body = assert_problem(response, 400, "request.invalid")
    assert (list(body["errors"]) if named else body["detail"][:20]) == (
        [named] if named else "Unknown kind 'oracle"
    )
    assert InferenceServer.objects.count() == 0


def test_clear_one_policy_then_all(trainer: Caller) -> None:
    kept, cleared = factories.make_policy(), factories.make_policy()
    factories.make_server(policy=kept)
    for _ in range(2):
        factories.make_server(policy=cleared)

    one = trainer.call("POST", "inference-servers/clear/", {"policy": cleared.name})
    rest = [each["policy"] for each in trainer.call("GET", "inference-servers/").json()["results"]]
    every = trainer.call("POST", "inference-servers/clear/")

    assert (one.status_code, one.json()) == (200, {"removed": 2})
    assert rest == [kept.name]
    assert every.json() == {"removed": 1}


def test_clear_of_an_unknown_policy_clears_nothing(trainer: Caller) -> None:
    factories.make_server()

    response = trainer.call("POST", "inference-servers/clear/", {"policy": "nobody"})

    assert_problem(response, 400, "request.invalid")
    assert InferenceServer.objects.registered().count() == 1


def test_another_trainers_policy_and_servers_are_not_there(
    trainer: Caller, stranger: Caller
) -> None:
    created = trainer.call(
        "POST", "policies/", {"name": "owned", "model": "m", "tokenizer": "/t"}
    ).json()
    server = {"policy": "owned", "url": "http://127.0.0.1:9"}
    trainer.call("POST", "inference-servers/", server)

    assert stranger.call("GET", f"policies/{created['id']}/").status_code == 404
    assert stranger.call("PATCH", f"policies/{created['id']}/", {"version": 9}).status_code == 404
    assert stranger.call("POST", "inference-servers/", server).status_code == 400
    assert stranger.call("POST", "inference-servers/clear/").json() == {"removed": 0}
    assert stranger.call("GET", "inference-servers/").json()["results"] == []

    assert trainer.call("GET", f"policies/{created['id']}/").json()["version"] == 0
    (left,) = trainer.call("GET", "inference-servers/").json()["results"]
    assert left["state"] == "active"


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_what_ids_mean_stays_while_rollouts_sample(trainer: Caller, name: str) -> None:
    rollout = factories.make_rollout()
    policy = rollout.experiment.policy

    refused = trainer.call("PATCH", f"policies/{policy.pk}/", {name: "another"})
    same = trainer.call("PATCH", f"policies/{policy.pk}/", {name: getattr(policy, name)})
    Rollout.objects.update(state=RolloutState.DONE, outcome=Outcome.CANCELLED, done_at=now())
    changed = trainer.call("PATCH", f"policies/{policy.pk}/", {name: "another"})

    assert_problem(refused, 409, "policy.in_use")
    assert (same.status_code, changed.json()[name]) == (200, "another")


@pytest.mark.parametrize(
    ("host", "allowed"), [("gpu7.cluster", True), ("10.0.3.4", True), ("metadata.internal", False)]
)
def test_servers_are_where_the_operator_says(
    trainer: Caller, settings: Any, host: str, allowed: bool
) -> None:
    settings.INFERENCE_HOSTS = ["gpu*.cluster", "10.0.*"]
    given = {"policy": factories.make_policy().name, "url": f"http://{host}:8000"}

    response = trainer.call("POST", "inference-servers/", given)

    assert response.status_code == (201 if allowed else 400)
    assert InferenceServer.objects.count() == int(allowed)


def test_the_version_goes_back_by_a_rewind_alone_while_experiments_sample(trainer: Caller) -> None:
    policy = factories.make_policy(owner=trainer.user)
    experiment = factories.make_experiment(owner=trainer.user, policy=policy)
    path = f"policies/{policy.pk}/"

    body = assert_problem(
        trainer.call("PATCH", path, {"version": 2}), 409, "policy.version_not_newer"
    )

    assert "POST experiments/{id}/rewind/" in body["detail"]
    policy.refresh_from_db()
    assert policy.version == 3
    trainer.call("POST", f"experiments/{experiment.pk}/stop/")
    assert trainer.call("PATCH", path, {"version": 2}).json()["version"] == 2
