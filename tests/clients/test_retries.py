"""When a call is sent again, and that nothing is made twice."""

from __future__ import annotations

import httpx
import pytest
from prorl_client import Client, RetryPolicy, ServerError
from prorl_client.errors import problem_from

from tests.clients import shapes
from tests.clients.scripted import BROKEN, Reply, Scripted, problem

PATH = "/experiments/e1/"
GOOD = Reply(body=shapes.experiment())


@pytest.mark.parametrize(
    "fault",
    [
        BROKEN,
        Reply(body=shapes.experiment(), cut=10),
        problem(429, "request.throttled", retry_after=0),
        problem(503, "service.unavailable", retry_after=0),
        Reply(502, b"bad gateway", content_type="text/plain"),
        Reply(504, b"", content_type="text/plain"),
        problem(409, "idempotency.running", retry_after=0),
    ],
    ids=["broken", "cut", "429", "503", "502", "504", "running"],
)
def test_passing_fault_is_tried_again(service: Scripted, client: Client, fault: Reply) -> None:
    service.on("GET", PATH, fault, fault, GOOD)

    assert client.experiment("e1").name == "demo"

    assert len(service.calls("GET", PATH)) == 3


def test_creation_is_sent_again_with_the_same_key_and_body(
    service: Scripted, client: Client
) -> None:
    service.on("POST", "/experiments/", BROKEN, problem(503, "x"), Reply(201, shapes.experiment()))

    client.create_experiment("demo", "tiny", group_size=2)

    asked = service.calls("POST", "/experiments/")
    assert len(asked) == 3
    assert len({each.key for each in asked}) == 1
    assert asked[0].key
    expected = {"name": "demo", "policy": "tiny", "group_size": 2}
    assert [each.body for each in asked] == [expected] * 3


def test_two_creations_have_two_keys(service: Scripted, client: Client) -> None:
    service.on("POST", "/experiments/", Reply(201, shapes.experiment()))

    client.create_experiment("demo", "tiny")
    client.create_experiment("demo", "tiny")

    first, second = service.calls("POST", "/experiments/")
    assert first.key != second.key


def test_insisting_ends_when_the_next_try_would_be_too_late(
    service: Scripted, client: Client
) -> None:
    service.on("GET", PATH, problem(503, "service.unavailable", "Down.", retry_after=100))

    with pytest.raises(ServerError, match=r"service\.unavailable \(503\): Down\."):
        client.experiment("e1")

    assert len(service.calls("GET", PATH)) == 1


def test_pauses_grow_to_a_limit_and_keep_what_the_service_asks_for() -> None:
    policy = RetryPolicy(first_seconds=1.0, longest_seconds=8.0)
    fault = httpx.ConnectError("no")

    pauses = [policy.pause(tries, fault) or 0.0 for tries in (1, 2, 3, 4, 5, 2000)]

    for pause, full in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * full <= pause <= full
    asked = problem_from(
        status=503, headers={"retry-after": "40"}, body=b"", call="", request_id=None
    )
    assert policy.pause(1, asked) == 40.0


def test_certificate_that_is_not_trusted_is_final() -> None:
    fault = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    assert RetryPolicy().pause(1, fault) is None


@pytest.mark.parametrize("value", ["", "soon", "-5", "inf", "nan"])
def test_retry_after_that_is_no_number_is_passed_over(value: str) -> None:
    fault = problem_from(
        status=503, headers={"retry-after": value}, body=b"", call="", request_id=None
    )

    assert fault.retry_after is None


def test_forked_child_has_connections_of_its_own(
    service: Scripted, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("GET", PATH, GOOD)
    client.experiment("e1")
    parents = client._transport._http

    monkeypatch.setattr("prorl_client._sync.transport.os.getpid", lambda: -1)
    client.experiment("e1")
    own = client._transport._http

    assert own is not parents
    assert not parents.is_closed
    client.close()
    assert own.is_closed
    parents.close()


def test_every_page_of_a_list_is_read(service: Scripted, client: Client) -> None:
    first = {"next": "http://elsewhere/api/v1/groups/?cursor=c2&page_size=200", "results": []}
    group = {"experiment": "e1", "task": "t", "samples": 1}
    service.on(
        "GET",
        "/groups/",
        Reply(body={**first, "results": [{"id": "g1", **group}]}),
        Reply(body={"next": None, "results": [{"id": "g2", **group}]}),
    )

    found = [each.id for each in client.groups(experiment="e1", state=["open", "ready"])]

    one, two = service.calls("GET", "/groups/")
    assert found == ["g1", "g2"]
    assert one.query == {"page_size": ["200"], "experiment": ["e1"], "state": ["open", "ready"]}
    assert two.query == {"cursor": ["c2"], "page_size": ["200"]}
