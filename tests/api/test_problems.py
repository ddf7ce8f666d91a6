"""Every fault is a problem."""

import logging
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import path
from rest_framework.views import APIView

import prorl_site.urls
from rollouts.models import Policy
from tests import factories
from tests.api.callers import Caller, assert_problem


class RaisingView(APIView):
    """A view with a bug."""

    def get(self, request: Any) -> Any:
        raise ZeroDivisionError("a secret detail")


class UnreachableView(APIView):
    """A view whose database is away."""

    def get(self, request: Any) -> Any:
        raise OperationalError("connection to 10.0.0.5 refused")


def raising_page(request: Any) -> Any:
    """A page with a bug, outside of the API framework."""
    raise ZeroDivisionError("a secret detail")


urlpatterns = [
    path("api/v1/raises/", RaisingView.as_view()),
    path("api/v1/unreachable/", UnreachableView.as_view()),
    path("api/v1/raises-early/", raising_page),
    *prorl_site.urls.urlpatterns,
]
handler500 = prorl_site.urls.handler500


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("path", ["/api/", "/api/v1/", "/api/v1/nothing/", "/api/v2/experiments/"])
def test_unknown_address(trainer: Caller, settings: Any, path: str, debug: bool) -> None:
    settings.DEBUG = debug

    body = assert_problem(trainer.call("GET", path), 404, "not_found")

    assert body["detail"] == f"Nothing is served at {path}."


def test_address_without_its_slash_says_so(trainer: Caller) -> None:
    body = assert_problem(trainer.call("POST", "experiments", {}), 404, "not_found")

    assert "end with a slash" in body["detail"]


def test_unknown_address_is_one_for_a_client_without_cookies_too(db: None) -> None:
    response = Client(enforce_csrf_checks=True).post("/api/v1/nothing/")

    assert_problem(response, 404, "not_found")


def test_host_that_is_not_ours(trainer: Caller) -> None:
    response = trainer.call("GET", "policies/", Host="evil.example")

    assert_problem(response, 400, "request.malformed")


def test_address_with_something_that_is_no_id(trainer: Caller) -> None:
    assert_problem(trainer.call("GET", "experiments/first/"), 404, "not_found")


def test_wrong_method(trainer: Caller) -> None:
    response = trainer.call("DELETE", "experiments/")

    assert_problem(response, 405, "request.method")
    assert response["Allow"] == "GET, POST, HEAD, OPTIONS"


def test_malformed_json(trainer: Caller) -> None:
    assert_problem(trainer.call("POST", "policies/", b'{"name": '), 400, "request.malformed")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000])
def test_json_nested_too_deep(trainer: Caller, body: bytes) -> None:
    assert_problem(trainer.call("POST", "policies/", body), 400, "request.malformed")


@pytest.mark.parametrize("body", [b"\xff\xfe", b'{"name": NaN}', b"9" * 5000])
def test_json_that_is_none(trainer: Caller, body: bytes) -> None:
    assert_problem(trainer.call("POST", "policies/", body), 400, "request.malformed")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"name": "x\\u0000"}', "the body.name"),
        (b'{"name": {"a": [1, "\\ud800"]}}', "the body.name.a[1]"),
        (b'{"name": 1, "\\uDFFF": 2}', "a name in the body"),
        (b'{"version": 1e999}', "the body.version"),
        (b'{"version": [-1E+400]}', "the body.version[0]"),
    ],
)
def test_json_that_cannot_be_stored(trainer: Caller, body: bytes, place: str) -> None:
    problem = assert_problem(trainer.call("POST", "policies/", body), 400, "request.malformed")

    assert problem["detail"].endswith(f": {place}.")


@pytest.mark.parametrize("body", [None, [], "text", 7])
def test_body_that_is_no_object(trainer: Caller, body: Any) -> None:
    assert_problem(trainer.call("POST", "policies/", body), 400, "request.invalid")
    assert Policy.objects.count() == 0


def test_other_media_type(trainer: Caller) -> None:
    response = trainer.post("/api/v1/policies/", "name=x", content_type="text/plain")

    assert_problem(response, 415, "request.media_type")


def test_answer_in_a_format_that_is_not_spoken(trainer: Caller) -> None:
    response = trainer.call("GET", "policies/", Accept="text/csv")

    assert_problem(response, 406, "request.not_acceptable")


def test_body_that_is_too_large(trainer: Caller, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    experiment = factories.make_experiment(owner=trainer.user)

    for address in ("policies/", f"experiments/{experiment.pk}/batches/"):
        response = trainer.call("POST", address, {"name": "x" * 1000})

        body = assert_problem(response, 413, "request.too_large")
        assert body["detail"] == "The body is larger than the limit of 1000 bytes."


def test_unknown_field_is_named(trainer: Caller) -> None:
    given = {"name": "p", "model": "m", "tokenizer": "t", "tokeniser": "t"}

    body = assert_problem(trainer.call("POST", "policies/", given), 400, "request.invalid")

    assert list(body["errors"]) == ["tokeniser"]
    assert Policy.objects.count() == 0


@pytest.mark.parametrize("path", ["rollouts/?state=running", "rollouts/?group=1", "groups/?task=x"])
def test_filter_with_a_wrong_value(trainer: Caller, path: str) -> None:
    assert_problem(trainer.call("GET", path), 400, "request.invalid")


@pytest.mark.parametrize("path", ["rollouts/", "policies/", "experiments/{id}/groups/"])
def test_filter_that_is_not_known(trainer: Caller, path: str) -> None:
    experiment = factories.make_experiment(owner=trainer.user)

    response = trainer.call("GET", f"{path.format(id=experiment.pk)}?stat=done")

    body = assert_problem(response, 400, "request.invalid")
    assert list(body["errors"]) == ["stat"]


def test_cursor_that_is_none(trainer: Caller) -> None:
    body = assert_problem(trainer.call("GET", "rollouts/?cursor=x"), 400, "request.invalid")

    assert body["errors"] == {"cursor": ["Not a cursor of this list."]}


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("path", ["/api/v1/raises/", "/api/v1/raises-early/"])
def test_bug_is_a_problem_that_tells_nothing(
    trainer: Caller, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.raise_request_exception = False
    with caplog.at_level(logging.ERROR):
        response = trainer.call("GET", path)

    assert_problem(response, 500, "server.error")
    assert b"secret" not in response.content
    assert "a secret detail" in caplog.text


@pytest.mark.urls(__name__)
def test_database_that_is_away(trainer: Caller) -> None:
    response = trainer.call("GET", "unreachable/")

    assert_problem(response, 503, "service.unavailable")
    assert response["Retry-After"] == "5"
    assert b"10.0.0.5" not in response.content


def test_pages_outside_of_the_api_are_no_problems(db: None) -> None:
    response = Client().get("/nothing/")

    assert response.status_code == 404
    assert response["Content-Type"].startswith("text/html")


def test_root_leads_to_the_admin(db: None) -> None:
    response = Client().get("/")

    assert (response.status_code, response["Location"]) == (302, "/admin/")
