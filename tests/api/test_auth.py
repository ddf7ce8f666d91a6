"""Who may call."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from rollouts.models import Experiment, Policy, TrainerToken
from rollouts.services.tokens import revoke_token
from tests import factories
from tests.api.callers import Caller, assert_problem


def test_call_without_a_token_is_refused(anybody: Caller) -> None:
    response = anybody.call("GET", "experiments/")

    body = assert_problem(response, 401, "auth.missing")
    assert body["detail"] == "Send `Authorization: Bearer TOKEN`."
    assert response["WWW-Authenticate"] == "Bearer"


def test_token_that_nobody_made_is_refused(db: None) -> None:
    assert_problem(Caller("0" * 64).call("GET", "experiments/"), 401, "auth.invalid")


def test_revoked_token_is_refused_and_changes_nothing(trainer: Caller) -> None:
    revoke_token(token=TrainerToken.objects.get())

    response = trainer.call("POST", "policies/", {"name": "p", "model": "m", "tokenizer": "t"})

    assert_problem(response, 401, "auth.invalid")
    assert Policy.objects.count() == 0


def test_expired_token_is_refused(trainer: Caller) -> None:
    TrainerToken.objects.update(expiry=timezone.now() - timedelta(seconds=1))

    assert_problem(trainer.call("GET", "experiments/"), 401, "auth.invalid")


def test_token_is_not_stored_in_clear(trainer: Caller) -> None:
    assert trainer.text not in str(TrainerToken.objects.values().get())


def test_use_of_a_token_is_noted(trainer: Caller) -> None:
    trainer.call("GET", "experiments/")

    assert TrainerToken.objects.get().used_at is not None


@pytest.mark.parametrize(
    ("scopes", "method", "path", "lacking"),
    [
        (["submit"], "GET", "experiments/", "read"),
        (["read"], "POST", "experiments/", "submit"),
        (["read", "submit"], "POST", "policies/", "policy"),
        (["read", "submit"], "POST", "inference-servers/", "policy"),
        (["read", "submit"], "POST", "inference-servers/clear/", "policy"),
    ],
)
def test_token_without_the_scope_is_refused(
    make_caller: Any, scopes: list[str], method: str, path: str, lacking: str
) -> None:
    body = assert_problem(make_caller(scopes=scopes).call(method, path), 403, "auth.forbidden")

    assert body["detail"] == f"This token lacks the scope '{lacking}'."


@pytest.mark.parametrize("path", ["nodes/", "sandboxes/"])
def test_operators_lists_are_closed_to_trainers(make_caller: Any, path: str) -> None:
    caller = make_caller(scopes=["read", "submit", "policy", "operate"])

    assert_problem(caller.call("GET", path), 403, "auth.forbidden")


def test_staff_token_without_the_operate_scope_is_refused(make_caller: Any) -> None:
    caller = make_caller(factories.make_operator(), scopes=["read"])

    assert_problem(caller.call("GET", "nodes/"), 403, "auth.forbidden")


def test_token_bound_to_an_experiment_reaches_that_one_only(make_caller: Any) -> None:
    owner = factories.make_user()
    mine, other = (factories.make_experiment(owner=owner) for _ in range(2))
    caller = make_caller(owner, experiments=[mine])

    listed = caller.call("GET", "experiments/").json()["results"]

    assert [each["id"] for each in listed] == [str(mine.pk)]
    assert_problem(caller.call("GET", f"experiments/{other.pk}/"), 404, "not_found")


def test_token_bound_to_an_experiment_creates_no_other(make_caller: Any) -> None:
    owner = factories.make_user()
    bound = factories.make_experiment(owner=owner)
    caller = make_caller(owner, experiments=[bound])

    response = caller.call("POST", "experiments/", {"name": "x", "policy": bound.policy.name})

    assert_problem(response, 403, "auth.bound_token")
    assert list(Experiment.objects.all()) == [bound]


def test_operators_session_reads_everything_and_needs_the_csrf_token_to_write(db: None) -> None:
    experiment = factories.make_experiment()
    client = Client(enforce_csrf_checks=True)
    client.force_login(factories.make_operator())

    read = client.get(f"/api/v1/experiments/{experiment.pk}/")
    written = client.post(f"/api/v1/experiments/{experiment.pk}/pause/")

    assert read.json()["id"] == str(experiment.pk)
    assert_problem(written, 403, "auth.forbidden")
    experiment.refresh_from_db()
    assert experiment.state == "active"


def test_session_of_a_user_who_is_not_staff_is_no_login(db: None) -> None:
    client = Client()
    client.force_login(factories.make_user())

    assert_problem(client.get("/api/v1/experiments/"), 401, "auth.missing")
