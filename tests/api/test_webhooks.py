"""Webhooks over HTTP: register, look at, change, remove."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from rollouts.models import Experiment, Webhook, WebhookDelivery
from tests import factories
from tests.api.callers import Caller, assert_problem

URL = "https://trainer.example/hooks"


@pytest.fixture
def experiment(trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


@pytest.fixture
def webhook(experiment: Experiment) -> Webhook:
    return Webhook.objects.create(experiment=experiment, url=URL, secret="whsec_c2VjcmV0")


@pytest.fixture
def delivery(webhook: Webhook) -> WebhookDelivery:
    return WebhookDelivery.objects.create(
        webhook=webhook, kind="counts", body={"kind": "counts"}, tries=3, detail="HTTP 500."
    )


def test_the_secret_is_told_once(trainer: Caller, experiment: Experiment) -> None:
    path = f"experiments/{experiment.pk}/webhooks/"
    body = {"url": URL, "kinds": ["group.ready", "counts", "counts"]}

    created = trainer.call("POST", path, body, Idempotency_Key="a")

    assert created.status_code == 201
    webhook = Webhook.objects.get()
    shown = created.json()
    assert shown.pop("secret") == webhook.secret
    assert shown == {
        "id": str(webhook.pk),
        "experiment": str(experiment.pk),
        "url": URL,
        "kinds": ["counts", "group.ready"],
        "active": True,
        "detail": "",
        "created_at": webhook.created_at.isoformat().replace("+00:00", "Z"),
    }
    again = trainer.call("POST", path, body, Idempotency_Key="a")
    assert (again.status_code, again.json()) == (201, {**shown, "secret": None})
    assert trainer.call("GET", path).json()["results"] == [shown]
    assert trainer.call("GET", f"webhooks/{webhook.pk}/").json() == shown
    assert Webhook.objects.count() == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"url": "http://127.0.0.1/"},
        {"url": "http://localhost:5432/"},
        {"url": "file:///etc/passwd"},
        {"url": URL, "kinds": ["everything"]},
        {"url": URL, "kinds": "counts"},
        {"url": URL, "secret": "mine"},
    ],
)
def test_registering_refuses(trainer: Caller, experiment: Experiment, body: Any) -> None:
    response = trainer.call("POST", f"experiments/{experiment.pk}/webhooks/", body)

    assert_problem(response, 400, "request.invalid")
    assert not Webhook.objects.exists()


def test_one_webhook_too_many(trainer: Caller, experiment: Experiment) -> None:
    for _ in range(10):
        Webhook.objects.create(experiment=experiment, url=URL, secret="x")
    response = trainer.call("POST", f"experiments/{experiment.pk}/webhooks/", {"url": URL})
    assert_problem(response, 409, "webhook.too_many")


def test_changing_and_removing(trainer: Caller, webhook: Webhook) -> None:
    path = f"webhooks/{webhook.pk}/"
    changed = trainer.call("PATCH", path, {"active": False, "kinds": ["counts"]})
    assert (changed.json()["active"], changed.json()["kinds"]) == (False, ["counts"])
    assert_problem(trainer.call("PATCH", path, {"url": "http://[::1]/"}), 400, "request.invalid")
    assert_problem(trainer.call("PATCH", path, {"secret": "mine"}), 400, "request.invalid")
    webhook.refresh_from_db()
    assert (webhook.url, webhook.active) == (URL, False)

    assert trainer.call("DELETE", path).status_code == 204
    assert_problem(trainer.call("GET", path), 404, "not_found")


def test_deliveries_and_sending_one_again(
    trainer: Caller, webhook: Webhook, delivery: WebhookDelivery
) -> None:
    path = f"webhooks/{webhook.pk}/deliveries/"
    (shown,) = trainer.call("GET", path).json()["results"]
    assert (shown["id"], shown["kind"], shown["tries"]) == (str(delivery.pk), "counts", 3)
    assert (shown["next_at"], shown["delivered_at"]) == (None, None)
    assert (shown["body"], shown["detail"]) == ({"kind": "counts"}, "HTTP 500.")

    again = trainer.call("POST", f"{path}{delivery.pk}/redeliver/")
    assert (again.status_code, again.json()["tries"]) == (202, 0)
    delivery.refresh_from_db()
    assert delivery.next_at is not None
    assert delivery.next_at <= timezone.now()
    assert_problem(trainer.call("POST", f"{path}{uuid4()}/redeliver/"), 404, "not_found")
    Webhook.objects.update(active=False)
    refused = trainer.call("POST", f"{path}{delivery.pk}/redeliver/")
    assert_problem(refused, 409, "webhook.inactive")


def test_others_see_and_change_nothing(
    stranger: Caller,
    anybody: Caller,
    trainer: Caller,
    make_caller: Callable[..., Caller],
    webhook: Webhook,
    delivery: WebhookDelivery,
) -> None:
    one = f"webhooks/{webhook.pk}/"
    calls: list[tuple[str, str, Any]] = [
        ("GET", one, None),
        ("PATCH", one, {"active": False}),
        ("DELETE", one, None),
        ("GET", f"{one}deliveries/", None),
        ("POST", f"{one}deliveries/{delivery.pk}/redeliver/", None),
        ("GET", f"experiments/{webhook.experiment_id}/webhooks/", None),
        ("POST", f"experiments/{webhook.experiment_id}/webhooks/", {"url": URL}),
    ]
    other = factories.make_experiment(owner=trainer.user)
    bound = make_caller(trainer.user, experiments=[other])
    reader = make_caller(trainer.user, scopes=["read"])
    for method, path, body in calls:
        assert_problem(stranger.call(method, path, body), 404, "not_found")
        assert_problem(bound.call(method, path, body), 404, "not_found")
        assert_problem(anybody.call(method, path, body), 401, "auth.missing")
        if method != "GET":
            assert_problem(reader.call(method, path, body), 403, "auth.forbidden")
    webhook.refresh_from_db()
    delivery.refresh_from_db()
    assert (webhook.active, delivery.next_at) == (True, None)
    assert Webhook.objects.count() == 1
