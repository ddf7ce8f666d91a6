"""Idempotency-Key on every creating call."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from rollouts.models import (
    Batch,
    Experiment,
    Group,
    IdempotencyRecord,
    InferenceServer,
    Policy,
)
from rollouts.services.idempotency import (
    ClaimedCall,
    IdempotencyRunning,
    RememberedAnswer,
    abandon_call,
    begin_call,
    fingerprint,
    forget_old_calls,
    remember_answer,
)
from sandboxes.models import Environment, Image
from tests import factories
from tests.api.callers import Caller, assert_problem

POLICY = {"name": "tiny", "model": "m", "tokenizer": "t"}


@pytest.fixture
def creating_calls(operator: Caller) -> dict[str, tuple[Any, Any]]:
    """Return every creating call: a body for each path, and the model whose rows it makes."""
    policy = factories.make_policy()
    task = factories.make_task()
    experiment = factories.make_experiment(owner=operator.user, policy=policy)
    return {
        "experiments/": ({"name": "x", "policy": policy.name}, Experiment),
        f"experiments/{experiment.pk}/groups/": ([{"task": str(task.pk), "samples": 1}], Group),
        "policies/": (POLICY, Policy),
        "inference-servers/": ({"policy": policy.name, "url": "http://h:1"}, InferenceServer),
        "images/": ({"name": "base", "source": "base.sif"}, Image),
        "environments/": ({"name": "shell"}, Environment),
    }


def test_same_key_and_body_is_the_same_thing(operator: Caller, creating_calls: Any) -> None:
    for path, (body, model) in creating_calls.items():
        before = model.objects.count()

        first = operator.call("POST", path, body, Idempotency_Key="key")
        again = operator.call("POST", path, body, Idempotency_Key="key")

        assert (first.status_code, first.json()) == (again.status_code, again.json()), path
        assert first.status_code in {201, 202}, path
        assert model.objects.count() == before + 1, path
        assert "Idempotency-Replayed" not in first, path
        assert again["Idempotency-Replayed"] == "true", path


def test_same_key_and_other_body_is_refused(operator: Caller, creating_calls: Any) -> None:
    for path, (body, model) in creating_calls.items():
        operator.call("POST", path, body, Idempotency_Key="key")
        count = model.objects.count()

        response = operator.call("POST", path, {"name": "other"}, Idempotency_Key="key")

        assert_problem(response, 422, "idempotency.conflict")
        assert model.objects.count() == count, path


def test_first_call_still_running(operator: Caller, creating_calls: Any) -> None:
    for path, (body, model) in creating_calls.items():
        begin_call(owner=operator.user, key="key", route=f"/api/v1/{path}", body=body)
        count = model.objects.count()

        response = operator.call("POST", path, body, Idempotency_Key="key")

        assert_problem(response, 409, "idempotency.running")
        assert response["Retry-After"] == "1"
        assert model.objects.count() == count, path


def test_white_space_and_order_of_keys_do_not_matter(trainer: Caller) -> None:
    spaced = json.dumps(dict(reversed(POLICY.items())), indent=4).encode()

    first = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")
    again = trainer.call("POST", "policies/", spaced, Idempotency_Key="key")

    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()


def test_keys_of_two_trainers_and_of_two_addresses_are_apart(
    trainer: Caller, stranger: Caller
) -> None:
    policy = factories.make_policy()
    body = {"name": "x", "policy": policy.name}

    mine = trainer.call("POST", "experiments/", body, Idempotency_Key="key").json()
    theirs = stranger.call("POST", "experiments/", body, Idempotency_Key="key").json()
    other = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")

    assert mine["id"] != theirs["id"]
    assert other.status_code == 201


def test_refused_call_leaves_the_key_free(trainer: Caller) -> None:
    bad = trainer.call("POST", "policies/", {**POLICY, "version": -1}, Idempotency_Key="key")
    good = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")

    assert (bad.status_code, good.status_code) == (400, 201)


def test_call_that_died_is_taken_over_after_a_minute(trainer: Caller) -> None:
    begin_call(owner=trainer.user, key="key", route="/api/v1/policies/", body=POLICY)
    IdempotencyRecord.objects.update(created_at=timezone.now() - timedelta(seconds=61))

    response = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")

    assert response.status_code == 201
    assert IdempotencyRecord.objects.get().status == 201


def test_slow_call_that_was_taken_over_does_not_commit(trainer: Caller) -> None:
    call = {"owner": trainer.user, "key": "key", "route": "/x/", "body": POLICY}
    slow = begin_call(**call)
    IdempotencyRecord.objects.update(created_at=timezone.now() - timedelta(seconds=61))
    other = begin_call(**call)
    assert isinstance(slow, ClaimedCall)
    assert isinstance(other, ClaimedCall)

    with pytest.raises(IdempotencyRunning):
        remember_answer(call=slow, status=201, body={"id": 1})
    abandon_call(call=slow)
    remember_answer(call=other, status=201, body={"id": 2})

    assert begin_call(**call) == RememberedAnswer(201, {"id": 2})


def test_answers_are_forgotten_after_a_day(trainer: Caller) -> None:
    first = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")
    day = timedelta(hours=24, seconds=1)
    assert forget_old_calls(now=timezone.now()) == 0
    IdempotencyRecord.objects.update(created_at=timezone.now() - day)

    later = trainer.call("POST", "policies/", POLICY, Idempotency_Key="key")

    assert first.status_code == 201
    assert_problem(later, 409, "policy.exists")
    assert forget_old_calls(now=timezone.now() + day) == 0


@pytest.mark.parametrize("key", ["", "x" * 201, "a\tb"])
def test_key_that_is_none(trainer: Caller, key: str) -> None:
    response = trainer.call("POST", "policies/", POLICY, Idempotency_Key=key)

    assert_problem(response, 400, "request.invalid")
    assert Policy.objects.count() == 0


def test_batch_is_leased_once_per_key(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    path = f"experiments/{experiment.pk}/batches/"

    none = trainer.call("POST", path, {"groups": 1}, Idempotency_Key="key")
    for _ in range(2):
        factories.make_ready_group(experiment=experiment)
    first = trainer.call("POST", path, {"groups": 1}, Idempotency_Key="key")
    again = trainer.call("POST", path, {"groups": 1}, Idempotency_Key="key")

    assert (none.status_code, first.status_code, again.status_code) == (204, 200, 200)
    assert b"".join(again.streaming_content) == b"".join(first.streaming_content)
    assert again["Idempotency-Replayed"] == "true"
    assert Batch.objects.count() == 1
    batch = Batch.objects.get()
    trainer.call("POST", f"batches/{batch.pk}/nack/")
    gone = trainer.call("POST", path, {"groups": 1}, Idempotency_Key="key")
    assert_problem(gone, 410, "batch.returned")


@pytest.mark.django_db(transaction=True)
def test_calls_at_the_same_time_make_one_thing(make_caller: Any) -> None:
    caller = make_caller()
    answers: list[tuple[int, Any]] = []
    start = threading.Barrier(6)

    def call() -> None:
        client = Caller(caller.text)
        start.wait(timeout=30)
        response = client.call("POST", "policies/", POLICY, Idempotency_Key="key")
        answers.append((response.status_code, response.json()))
        connection.close()

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    policy = Policy.objects.get()
    assert len(answers) == 6
    made = [body for status, body in answers if status == 201]
    refused = [body for status, body in answers if status != 201]
    assert {body["id"] for body in made} == {str(policy.pk)}
    assert {body["code"] for body in refused} <= {"idempotency.running"}


def test_what_makes_two_bodies_the_same() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])
