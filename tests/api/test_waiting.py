"""Long-polling for batches, over HTTP to a real ASGI server."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from django.db import connection

from rollouts.api import waiting
from rollouts.models import Batch, Experiment, Group, TrainerToken
from rollouts.services.tokens import revoke_token
from tests import factories
from tests.api.callers import Caller
from tests.api.live import eventually, served
from tests.services.finishing import finish, open_group

pytestmark = [pytest.mark.django_db(transaction=True)]

PATIENT = {"groups": 1, "wait_seconds": 50}


@dataclass
class Pauses:
    """How many waits were begun, and how many of them were broken off."""

    begun: int = 0
    broken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Count the pauses between tries."""
    seen = Pauses()

    async def observed(seconds: float) -> None:
        seen.begun += 1
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            seen.broken += 1
            raise

    monkeypatch.setattr(waiting, "sleep", observed)
    return seen


@pytest.fixture
def experiment(transactional_db: None, trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


@pytest.fixture
def base(transactional_db: None) -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture
def post(base: str, trainer: Caller, experiment: Experiment) -> Callable[..., httpx.Response]:
    """Return a function that asks for a batch."""

    def ask(body: Any, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{base}/api/v1/experiments/{experiment.pk}/batches/",
            json=body,
            headers={
                "Authorization": f"Bearer {trainer.text}",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
            timeout=60,
        )

    return ask


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as executor:
        yield executor


def test_batch_comes_when_its_groups_are_finished(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    asked = pool.submit(post, PATIENT)
    eventually(lambda: pauses.begun >= 2, "the call waits")
    assert not asked.done()

    group = factories.make_ready_group(experiment=experiment)

    response = asked.result(timeout=60)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    found = {each["group"] for each in response.json()["trajectories"]}
    assert found == {str(group.pk)}


def test_trajectories_arrive_as_lines(post: Any, experiment: Experiment) -> None:
    factories.make_ready_group(experiment=experiment, rewards=[0.0] * 70)

    response = post({"groups": 1}, Accept="application/x-ndjson")

    assert response.headers["content-type"] == "application/x-ndjson"
    samples = [json.loads(line)["sample"] for line in response.text.splitlines()]
    assert samples == list(range(70))


def test_wait_that_ends_with_nothing(post: Any, pauses: Pauses) -> None:
    response = post({"groups": 1, "wait_seconds": 0.2})

    assert (response.status_code, response.content) == (204, b"")
    assert pauses.begun >= 1
    assert Batch.objects.count() == 0


def test_no_wait_is_no_wait(post: Any, pauses: Pauses) -> None:
    assert post({"groups": 1}).status_code == 204
    assert pauses.begun == 0


def test_wait_is_capped(post: Any, settings: Any) -> None:
    settings.BATCH_WAIT_LIMIT_SECONDS = 0.1

    assert post({"groups": 1, "wait_seconds": 1e9}).status_code == 204


def test_waiting_holds_no_connection(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    asked = [pool.submit(post, PATIENT) for _ in range(20)]
    eventually(lambda: pauses.begun >= 40, "every call waits")
    connection.close()

    def all_there() -> bool:
        stats = connection.pool.get_stats()
        return bool(stats["pool_available"] == stats["pool_size"])

    eventually(all_there, "every connection is back in the pool while the calls wait")
    assert not any(each.done() for each in asked)
    groups = [factories.make_ready_group(experiment=experiment) for _ in range(20)]

    bodies = [each.result(timeout=60).json() for each in asked]
    got = [body["trajectories"][0]["group"] for body in bodies]
    assert sorted(got) == sorted(str(group.pk) for group in groups)


def test_caller_who_left_leases_nothing(
    base: str, trainer: Caller, experiment: Experiment, pauses: Pauses
) -> None:
    link = http.client.HTTPConnection(base.removeprefix("http://"), timeout=60)
    link.request(
        "POST",
        f"/api/v1/experiments/{experiment.pk}/batches/",
        body=json.dumps(PATIENT),
        headers={
            "Authorization": f"Bearer {trainer.text}",
            "Content-Type": "application/json",
        },
    )
    eventually(lambda: pauses.begun >= 1, "the call waits")
    link.close()
    eventually(lambda: pauses.broken == 1, "the service notices")
    begun = pauses.begun

    group = factories.make_ready_group(experiment=experiment)

    answer = httpx.get(f"{base}/healthz")
    group.refresh_from_db()
    assert (answer.status_code, group.state, pauses.begun) == (200, "ready", begun)


def test_same_key_joins_the_wait(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    def persistent() -> Any:
        while (response := post(PATIENT, Idempotency_Key="key")).status_code == 409:
            assert response.json()["code"] == "idempotency.running"
        return response

    asked = [pool.submit(persistent) for _ in range(4)]
    eventually(lambda: pauses.begun >= 4, "the calls wait")
    for _ in range(4):
        factories.make_ready_group(experiment=experiment)

    responses = [each.result(timeout=60) for each in asked]

    assert [each.status_code for each in responses] == [200] * 4
    assert {each.headers["batch-id"] for each in responses} == {str(Batch.objects.get().pk)}
    assert Group.objects.filter(state="ready").count() == 3


def test_token_revoked_while_waiting_gets_nothing(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    asked = pool.submit(post, PATIENT)
    eventually(lambda: pauses.begun >= 1, "the call waits")
    revoke_token(token=TrainerToken.objects.get())

    group = factories.make_ready_group(experiment=experiment)

    response = asked.result(timeout=60)
    assert (response.status_code, response.json()["code"]) == (401, "auth.invalid")
    group.refresh_from_db()
    assert group.state == "ready"


def test_refusals_are_problems_here_too(post: Any, base: str) -> None:
    refused = post({"groups": 0, "wait_seconds": 50})
    nowhere = httpx.get(f"{base}/api/v1/nothing/")

    for response, status in ((refused, 400), (nowhere, 404)):
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"


def test_a_wait_lasts_until_the_group_in_front_is_finished(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    slow = open_group(experiment, samples=1)
    quick = finish(open_group(experiment, samples=1))
    asked = pool.submit(post, PATIENT)
    eventually(lambda: pauses.begun >= 2, "the call waits")
    assert not asked.done()

    finish(slow)

    assert asked.result(timeout=60).json()["trajectories"][0]["group"] == str(slow.pk)
    quick.refresh_from_db()
    assert quick.state == "ready"


def test_two_trainers_that_wait_at_once_never_get_the_same_group(
    post: Any, pool: ThreadPoolExecutor, pauses: Pauses, experiment: Experiment
) -> None:
    pair = {"groups": 2, "wait_seconds": 50}
    asked = [pool.submit(post, pair) for _ in range(2)]
    eventually(lambda: pauses.begun >= 4, "both wait")

    finished = [finish(open_group(experiment, samples=1)) for _ in range(3)]
    eventually(lambda: any(each.done() for each in asked), "one of them got a batch")
    assert Group.objects.filter(state="leased").count() == 2
    assert Group.objects.filter(state="ready").count() == 1
    finished.append(finish(open_group(experiment, samples=1)))

    bodies = [each.result(timeout=60).json() for each in asked]
    got = [{each["group"] for each in body["trajectories"]} for body in bodies]
    assert got[0] | got[1] == {str(group.pk) for group in finished}
    assert sorted(body["number"] for body in bodies) == [1, 2]
