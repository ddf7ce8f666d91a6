"""What a trainer reads when the service refuses."""

from __future__ import annotations

import pytest
from prorl_client import (
    AuthError,
    Client,
    Conflict,
    InvalidRequest,
    LeaseExpired,
    NotFound,
    ProblemError,
    RetryPolicy,
    ServerError,
    ServiceUnreachable,
    UnreadableContent,
)

from tests.clients import shapes
from tests.clients.scripted import Reply, Scripted, problem

PATH = "/experiments/e1/"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "request.invalid", InvalidRequest),
        (401, "auth.invalid", AuthError),
        (403, "auth.forbidden", AuthError),
        (404, "not_found", NotFound),
        (409, "experiment.stopped", Conflict),
        (409, "batch.expired", LeaseExpired),
        (410, "batch.returned", LeaseExpired),
        (413, "request.too_large", InvalidRequest),
        (422, "idempotency.conflict", InvalidRequest),
        (500, "server.error", ServerError),
    ],
)
def test_refusal_is_an_error_of_its_kind(
    service: Scripted, client: Client, status: int, code: str, kind: type[ProblemError]
) -> None:
    service.on("GET", PATH, problem(status, code, "What happened."))

    with pytest.raises(ProblemError) as caught:
        client.experiment("e1")

    error = caught.value
    assert type(error) is kind
    assert (error.status, error.code, error.detail) == (status, code, "What happened.")
    assert len(service.calls("GET", PATH)) == 1
    sent = service.calls("GET", PATH)[0].headers["x-request-id"]
    assert error.request_id == sent
    assert str(error).startswith(f"{code} ({status}): What happened.")
    assert f"GET {PATH}; request {sent}" in str(error)


def test_message_says_what_to_do_and_which_fields_are_wrong(
    service: Scripted, client: Client
) -> None:
    errors = {"groups": [{}, {"samples": ["Too many."]}], "name": ["Missing.", "Really."]}
    service.on("GET", PATH, problem(400, "task.unknown", "No.", errors=errors))

    with pytest.raises(InvalidRequest) as caught:
        client.experiment("e1")

    text = str(caught.value)
    assert "\n  groups[1].samples: Too many." in text
    assert "\n  name: Missing. Really." in text
    assert "`prorl tasks list`" in text


def test_answer_that_is_no_problem_document(service: Scripted, client: Client) -> None:
    service.on("GET", PATH, Reply(418, b"<h1>teapot</h1>", content_type="text/html"))

    with pytest.raises(InvalidRequest) as caught:
        client.experiment("e1")

    assert (caught.value.code, caught.value.detail) == ("http.418", "<h1>teapot</h1>")


def test_page_of_something_else_is_not_taken_for_json(service: Scripted, client: Client) -> None:
    service.on("GET", PATH, Reply(200, b"<html>welcome", content_type="text/html"))

    with pytest.raises(UnreadableContent, match="is this the service's address"):
        client.experiment("e1")


def test_redirect_is_not_followed_with_the_token(service: Scripted, client: Client) -> None:
    service.on("GET", PATH, Reply(301, headers={"Location": "http://127.0.0.1:1/else"}))

    with pytest.raises(InvalidRequest) as caught:
        client.experiment("e1")

    assert caught.value.code == "http.301"


def test_nobody_there() -> None:
    once = RetryPolicy(total_seconds=0.0)
    with (
        Client("http://127.0.0.1:9", "secret", retries=once) as client,
        pytest.raises(ServiceUnreachable, match="Is the address right"),
    ):
        client.experiment("e1")


def test_unknown_members_are_kept_and_absent_ones_default(
    service: Scripted, client: Client
) -> None:
    service.on("GET", PATH, Reply(body=shapes.experiment(colour="blue", task_sets=["a"])))

    found = client.experiment("e1")

    assert found.raw["colour"] == "blue"
    assert (found.name, found.task_sets, found.exhausted) == ("demo", ("a",), False)
    assert found.created_at is not None
    assert found.created_at.isoformat() == "2026-11-30T10:00:00.123456+00:00"


def test_token_is_not_shown(client: Client) -> None:
    assert "secret" not in repr(client._transport.address)
