"""Weight updates of policies over HTTP."""

from typing import Any

import pytest

from rollouts.models import Experiment, Policy, PolicyUpdate
from tests import factories
from tests.api.callers import Caller, assert_problem

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.broker]


@pytest.fixture
def policy() -> Policy:
    return factories.make_policy()


def begin(caller: Caller, policy: Policy, **values: Any) -> Any:
    body = {"version": 4, "mode": "none", **values}
    return caller.call("POST", f"policies/{policy.pk}/updates/", body)


def test_begin_read_complete(trainer: Caller, policy: Policy) -> None:
    begun = begin(trainer, policy)

    update = PolicyUpdate.objects.get()
    assert begun.status_code == 202
    assert begun.json() == {
        "id": str(update.pk),
        "policy": str(policy.pk),
        "number": 1,
        "from_version": 3,
        "to_version": 4,
        "mode": "none",
        "control": False,
        "state": "ready",
        "detail": "",
        "alarm": "",
        "servers": [],
        "created_at": stamp(update.created_at),
        "paused_at": None,
        "ready_at": stamp(update.ready_at),
        "ended_at": None,
        "released_at": None,
    }
    assert update.requested_by == trainer.user
    assert trainer.call("GET", f"policies/{policy.pk}/updates/1/").json() == begun.json()
    listed = trainer.call("GET", f"policies/{policy.pk}/updates/").json()
    assert listed["results"] == [begun.json()]

    answers = [trainer.call("POST", f"policies/{policy.pk}/updates/1/complete/") for _ in range(2)]

    assert [(each.status_code, each.json()["state"]) for each in answers] == [
        (200, "completed"),
        (200, "completed"),
    ]
    assert trainer.call("GET", f"policies/{policy.pk}/").json()["version"] == 4


def test_abandon_with_a_reason(trainer: Caller, policy: Policy) -> None:
    begin(trainer, policy, mode="drain-calls")

    given = {"detail": "the checkpoint is broken"}
    answer = trainer.call("POST", f"policies/{policy.pk}/updates/1/abandon/", given)

    assert (answer.status_code, answer.json()["state"]) == (200, "abandoned")
    assert answer.json()["detail"] == "the checkpoint is broken"
    again = trainer.call("POST", f"policies/{policy.pk}/updates/1/complete/")
    assert_problem(again, 409, "policy.update_ended")
    assert trainer.call("GET", f"policies/{policy.pk}/").json()["version"] == 3


def test_one_is_open_at_a_time(trainer: Caller, policy: Policy) -> None:
    begin(trainer, policy)

    assert_problem(begin(trainer, policy, version=5), 409, "policy.update_open")
    patched = trainer.call("PATCH", f"policies/{policy.pk}/", {"version": 9})
    assert_problem(patched, 409, "policy.update_open")

    assert list(PolicyUpdate.objects.values_list("to_version", flat=True)) == [4]
    policy.refresh_from_db()
    assert policy.version == 3


def test_the_same_key_begins_one_update(trainer: Caller, policy: Policy) -> None:
    path, body = f"policies/{policy.pk}/updates/", {"version": 4, "mode": "abort"}

    first, second = (trainer.call("POST", path, body, Idempotency_Key="update-4") for _ in range(2))

    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json() == second.json()
    assert PolicyUpdate.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"version": 3}, 409, "policy.version_not_newer"),
        ({"version": 0}, 400, "request.invalid"),
        ({"version": 2**63}, 400, "request.invalid"),
        ({"mode": "gently"}, 400, "request.invalid"),
        ({"control": True}, 403, "policy.control_not_allowed"),
        ({"x": 1}, 400, "request.invalid"),
    ],
)
def test_begin_refuses(
    trainer: Caller, policy: Policy, change: dict[str, Any], status: int, code: str
) -> None:
    assert_problem(begin(trainer, policy, **change), status, code)

    assert not PolicyUpdate.objects.exists()


def test_a_strangers_policy_has_no_updates(trainer: Caller, stranger: Caller) -> None:
    policy = factories.make_policy(owner=trainer.user)
    begin(trainer, policy)

    assert_problem(begin(stranger, policy, version=9), 404, "not_found")
    for method, path in (
        ("GET", ""),
        ("GET", "1/"),
        ("POST", "1/complete/"),
        ("POST", "1/abandon/"),
    ):
        answer = stranger.call(method, f"policies/{policy.pk}/updates/{path}")
        assert_problem(answer, 404, "not_found")

    assert PolicyUpdate.objects.get().state == "ready"


def test_an_update_that_is_not_there(trainer: Caller, policy: Policy) -> None:
    for method, path in (("GET", ""), ("POST", "complete/"), ("POST", "abandon/")):
        answer = trainer.call(method, f"policies/{policy.pk}/updates/7/{path}")
        assert_problem(answer, 404, "not_found")


def test_experiments_bound_their_policy_lag(trainer: Caller, policy: Policy) -> None:
    given = {"name": "e", "policy": policy.name, "max_policy_lag": 2, "on_policy_lag": "drop"}
    created = trainer.call("POST", "experiments/", given).json()
    assert (created["max_policy_lag"], created["on_policy_lag"]) == (2, "drop")

    patched = trainer.call("PATCH", f"experiments/{created['id']}/", {"max_policy_lag": None})

    assert patched.json()["max_policy_lag"] is None
    refused = trainer.call("PATCH", f"experiments/{created['id']}/", {"on_policy_lag": "shrug"})
    assert list(assert_problem(refused, 400, "request.invalid")["errors"]) == ["on_policy_lag"]
    assert Experiment.objects.get().on_policy_lag == "drop"


def test_text_only_policies_and_openai_servers_need_each_other(trainer: Caller) -> None:
    chat = trainer.call("POST", "policies/", {"name": "chat", "model": "m", "tokenizer": ""}).json()
    tokens = factories.make_policy()
    given = {"url": "http://127.0.0.1:9", "kind": "openai"}

    accepted = trainer.call("POST", "inference-servers/", {**given, "policy": chat["id"]})
    assert accepted.status_code == 201
    for body in (
        {**given, "policy": chat["id"], "kind": "vllm"},
        {**given, "policy": tokens.name},
    ):
        assert_problem(trainer.call("POST", "inference-servers/", body), 400, "request.invalid")
    changed = trainer.call("PATCH", f"policies/{chat['id']}/", {"tokenizer": "/models/tiny"})
    assert_problem(changed, 409, "policy.has_servers")


def stamp(moment: Any) -> str:
    return str(moment.isoformat()).replace("+00:00", "Z")
