"""Webhooks: signed, tried again, never into our own network, and at nobody else's cost."""

import ipaddress
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings
from django.utils import timezone
from standardwebhooks import Webhook as Verifier

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.models import Experiment, Webhook, WebhookDelivery
from rollouts.services import webhook_delivery
from rollouts.services.event_streams import end_of
from rollouts.services.events import EventKind, emit, flush_events, stream_key
from rollouts.services.webhook_addresses import check_url, is_public
from rollouts.services.webhook_delivery import PAUSES, collect, deliver_webhooks
from rollouts.services.webhooks import (
    create_webhook,
    delete_webhook,
    positions_key,
    redeliver,
    update_webhook,
)
from tests import factories


@dataclass
class Receiver:
    """A receiver of webhooks, as its address and what it got; `answers` are its next statuses."""

    url: str = ""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    location: str = ""
    silent: threading.Event | None = None

    @property
    def places(self) -> list[Any]:
        """Return the places of the events that it got."""
        return [json.loads(body)["data"].get("place") for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            if found.silent is not None:
                found.silent.wait(60)
                self.close_connection = True
                return
            status = found.answers.pop(0) if found.answers else 204
            self.send_response(status)
            if found.location:
                self.send_header("Location", found.location)
            said = b"" if status == 204 else b"because \0" + b"x" * 5000
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}/hooks?x=1"
        yield found
        if found.silent is not None:
            found.silent.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def store(transactional_db: None, settings: Any) -> Iterator[Any]:
    settings.WEBHOOK_HOSTS = ["127.0.0.1"]
    with redis.Redis.from_url(django_settings.BROKER_URL, decode_responses=True) as client:
        assert flush_events(20)
        client.flushall()
        yield client


@pytest.fixture
def experiment(store: Any) -> Experiment:
    return factories.make_experiment()


def make(experiment: Experiment, url: str, *kinds: str) -> Webhook:
    return create_webhook(experiment=experiment, url=url, kinds=list(kinds))[0]


def tell(experiment: Experiment, *places: int, kind: str = EventKind.GROUP_READY) -> None:
    for place in places:
        emit(experiment.pk, kind, place=place)
    assert flush_events(20)


def due_again() -> None:
    """Let the time until the next try pass."""
    WebhookDelivery.objects.filter(next_at__isnull=False).update(next_at=timezone.now())


def the_delivery() -> WebhookDelivery:
    return WebhookDelivery.objects.get()


def test_an_event_is_delivered_once_with_a_signature_that_verifies(
    experiment: Experiment, receiver: Receiver
) -> None:
    tell(experiment, 0)
    webhook, secret = create_webhook(experiment=experiment, url=receiver.url, kinds=[])
    tell(experiment, 1)

    assert deliver_webhooks() == 1
    assert deliver_webhooks() == 0

    ((headers, body),) = receiver.got
    content = Verifier(secret).verify(body, headers)
    assert content["type"] == "group.ready"
    assert content["timestamp"] == content["data"]["at"]
    assert content["data"]["experiment"] == str(experiment.pk)
    assert content["data"]["place"] == 1
    assert headers["content-type"] == "application/json"
    delivery = the_delivery()
    assert headers["webhook-id"] == str(delivery.pk)
    assert (delivery.webhook_id, delivery.tries, delivery.next_at) == (webhook.pk, 1, None)
    assert delivery.delivered_at is not None
    assert secret.startswith("whsec_")
    assert secret not in body.decode()


def test_only_the_kinds_that_are_wanted_and_resyncs(
    experiment: Experiment, receiver: Receiver
) -> None:
    make(experiment, receiver.url, "counts")
    tell(experiment, 1)
    tell(experiment, 2, kind=EventKind.COUNTS)
    tell(experiment, 3, kind=EventKind.RESYNC)

    assert deliver_webhooks() == 2
    assert sorted(receiver.places) == [2, 3]


def test_a_refused_delivery_is_tried_again_with_growing_waits_and_then_given_up(
    experiment: Experiment, receiver: Receiver
) -> None:
    make(experiment, receiver.url)
    tell(experiment, 1)
    receiver.answers = [500] * (len(PAUSES) + 1)

    for tries, pause in enumerate(PAUSES, start=1):
        before = timezone.now()
        assert deliver_webhooks() == 0
        delivery = the_delivery()
        assert delivery.tries == tries
        assert delivery.next_at is not None
        assert delivery.next_at >= before + timedelta(seconds=pause)
        assert delivery.detail.startswith("HTTP 500. because xxx")
        assert len(delivery.detail) < 600
        assert deliver_webhooks() == 0
        assert len(receiver.got) == tries
        due_again()
    assert deliver_webhooks() == 0

    delivery = the_delivery()
    assert (delivery.tries, delivery.next_at, delivery.delivered_at) == (
        len(PAUSES) + 1,
        None,
        None,
    )
    assert delivery.detail.endswith(f"Given up after {len(PAUSES) + 1} tries.")
    ids = {headers["webhook-id"] for headers, _ in receiver.got}
    assert ids == {str(delivery.pk)}
    assert Webhook.objects.get().active


def test_what_failed_once_is_taken_later(experiment: Experiment, receiver: Receiver) -> None:
    make(experiment, receiver.url)
    tell(experiment, 1, 2, 3)
    receiver.answers = [503]
    assert deliver_webhooks() == 0
    assert receiver.places == [1]  # one try shows that the receiver is away
    due_again()

    assert deliver_webhooks() == 3
    assert receiver.places == [1, 1, 2, 3]
    assert list(WebhookDelivery.objects.order_by("created_at").values_list("tries", flat=True)) == [
        2,
        1,
        1,
    ]


def test_a_receiver_that_is_silent_costs_its_time_limit_and_holds_up_no_other(
    experiment: Experiment, receiver: Receiver, settings: Any
) -> None:
    settings.WEBHOOK_SECONDS = 0.2
    receiver.silent = threading.Event()
    make(experiment, receiver.url)
    other = factories.make_experiment()
    make(other, "http://127.0.0.1:1/nobody")
    tell(experiment, 1, 2)
    tell(other, 3)

    assert deliver_webhooks() == 0

    details = dict(WebhookDelivery.objects.filter(tries=1).values_list("webhook__url", "detail"))
    assert details[receiver.url] == "No answer within 0.2 s."
    assert "127.0.0.1" in details["http://127.0.0.1:1/nobody"]
    assert len(receiver.got) == 1


def test_redirects_are_not_followed(experiment: Experiment, receiver: Receiver) -> None:
    make(experiment, receiver.url)
    receiver.answers, receiver.location = [302, 302], receiver.url
    tell(experiment, 1)

    assert deliver_webhooks() == 0
    assert len(receiver.got) == 1
    assert the_delivery().detail.startswith("HTTP 302.")


def test_a_receiver_that_is_gone_is_switched_off(
    experiment: Experiment, receiver: Receiver
) -> None:
    webhook = make(experiment, receiver.url)
    receiver.answers = [410]
    tell(experiment, 1)
    deliver_webhooks()
    tell(experiment, 2)
    deliver_webhooks()

    webhook.refresh_from_db()
    assert not webhook.active
    assert webhook.detail.startswith("The receiver answered 410: it is gone. Last: HTTP 410.")
    assert receiver.places == [1]


def test_a_receiver_that_takes_nothing_for_days_is_switched_off_and_on_again(
    experiment: Experiment, receiver: Receiver, settings: Any
) -> None:
    settings.WEBHOOK_GIVE_UP_DAYS = 5
    webhook = make(experiment, receiver.url)
    receiver.answers = [500, 500]
    tell(experiment, 1)
    deliver_webhooks()
    webhook.refresh_from_db()
    assert webhook.active
    due_again()
    WebhookDelivery.objects.update(created_at=timezone.now() - timedelta(days=5, minutes=1))
    deliver_webhooks()

    webhook.refresh_from_db()
    assert (webhook.active, webhook.detail.startswith("Nothing was taken for 5 days.")) == (
        False,
        True,
    )
    due_again()
    assert deliver_webhooks() == 0
    assert len(receiver.got) == 2

    receiver.answers = [500]
    update_webhook(webhook_id=webhook.pk, active=True)
    deliver_webhooks()
    webhook.refresh_from_db()
    assert (webhook.active, webhook.detail) == (True, "")
    due_again()
    assert deliver_webhooks() == 1


def test_a_delivery_is_sent_again_on_demand(experiment: Experiment, receiver: Receiver) -> None:
    webhook = make(experiment, receiver.url)
    tell(experiment, 1)
    deliver_webhooks()
    delivery = the_delivery()

    redeliver(webhook_id=webhook.pk, delivery_id=delivery.pk)
    assert deliver_webhooks() == 1
    assert [headers["webhook-id"] for headers, _ in receiver.got] == [str(delivery.pk)] * 2

    with pytest.raises(NotThere):
        redeliver(webhook_id=webhook.pk, delivery_id=webhook.pk)
    update_webhook(webhook_id=webhook.pk, active=False)
    with pytest.raises(StateConflict, match="switched off"):
        redeliver(webhook_id=webhook.pk, delivery_id=delivery.pk)


def test_collecting_twice_makes_each_delivery_once(
    experiment: Experiment, receiver: Receiver, store: Any
) -> None:
    make(experiment, receiver.url)
    position = store.hgetall(positions_key())
    tell(experiment, 1, 2)
    collect()
    store.hset(positions_key(), mapping=position)  # as if two workers did so at once
    collect()

    assert WebhookDelivery.objects.count() == 2


def test_a_store_that_lost_its_streams_makes_one_resync(
    experiment: Experiment, receiver: Receiver, store: Any
) -> None:
    make(experiment, receiver.url, "counts")
    tell(experiment, 1)
    deliver_webhooks()
    store.flushall()
    deliver_webhooks()
    tell(experiment, 2, kind=EventKind.COUNTS)
    deliver_webhooks()

    kinds = [json.loads(body)["type"] for _, body in receiver.got]
    assert kinds == ["resync", "counts"]


def test_a_receiver_with_much_waiting_gets_no_more_and_then_a_resync(
    experiment: Experiment,
    receiver: Receiver,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook_delivery, "WAITING_LIMIT", 2)
    make(experiment, receiver.url)
    tell(experiment, 1, 2)
    collect()
    tell(experiment, 3)
    collect()
    assert WebhookDelivery.objects.count() == 2
    store.xtrim(stream_key(experiment.pk), maxlen=0)
    assert deliver_webhooks() == 2
    assert deliver_webhooks() == 1

    assert [json.loads(body)["type"] for _, body in receiver.got[2:]] == ["resync"]
    assert store.hvals(positions_key()) == [end_of(experiment.pk)]


def test_a_removed_webhook_gets_nothing(
    experiment: Experiment, receiver: Receiver, store: Any
) -> None:
    webhook, kept = make(experiment, receiver.url), make(experiment, receiver.url)
    tell(experiment, 1)
    collect()
    delete_webhook(webhook_id=webhook.pk)
    assert deliver_webhooks() == 1
    assert store.hkeys(positions_key()) == [str(kept.pk)]


def test_old_deliveries_are_forgotten(experiment: Experiment, receiver: Receiver) -> None:
    make(experiment, receiver.url)
    tell(experiment, 1)
    deliver_webhooks()
    WebhookDelivery.objects.update(created_at=timezone.now() - timedelta(days=8))
    collect()
    assert not WebhookDelivery.objects.exists()


def test_an_experiment_has_so_many_webhooks(experiment: Experiment) -> None:
    for _ in range(10):
        make(experiment, "http://127.0.0.1:9/x")
    with pytest.raises(StateConflict, match="10 webhooks already"):
        make(experiment, "http://127.0.0.1:9/x")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "trainer.example/hooks",
        "ftp://trainer.example/",
        "http://",
        "http://user:pass@trainer.example/",
        "http://trainer.example/#part",
        "http://trainer.example:0/",
        "http://trainer.example:99999/",
        "http://trainer example/",
        "http://trainer.example/\n",
        "http://tr\u00e4iner.example/",
        f"http://trainer.example/{'x' * 500}",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://db.localhost/",
        "http://127.0.0.1/",
        "http://127.0.0.1./",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://0x7f000001/",
        "http://%31%32%37.0.0.1/",
        "http://127.0.0.%31/",
        "http://0.0.0.0/",
        "http://10.1.2.3/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[fe80::1%25eth0]/",
        "http://[fd00::1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://224.0.0.1/",
    ],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidValue):
        check_url(url)


@pytest.mark.parametrize(
    "url", ["https://trainer.example/hooks?a=b", "http://8.8.8.8:8080/", "http://[2606:4700::1]/"]
)
def test_addresses_that_are_taken(url: str) -> None:
    check_url(url)


def test_listed_hosts_may_be_private(settings: Any) -> None:
    settings.WEBHOOK_HOSTS = ["10.0.*", "*.cluster"]
    check_url("http://10.0.3.4/")
    check_url("http://trainer.cluster/")
    with pytest.raises(InvalidValue, match="PRORL_WEBHOOK_HOSTS"):
        check_url("http://10.1.3.4/")


@pytest.mark.parametrize("name", ["localhost", "ip6-localhost"])
def test_a_name_that_leads_to_a_private_address_is_not_reached(
    experiment: Experiment, receiver: Receiver, settings: Any, name: str
) -> None:
    webhook = make(experiment, "https://trainer.example/")
    # As if the name had led elsewhere when it was registered.
    Webhook.objects.filter(pk=webhook.pk).update(url=receiver.url.replace("127.0.0.1", name))
    tell(experiment, 1)

    assert deliver_webhooks() == 0
    assert receiver.got == []
    assert the_delivery().detail != ""

    settings.WEBHOOK_HOSTS = ["localhost"]
    due_again()
    assert deliver_webhooks() == (name == "localhost")


def test_an_address_that_was_listed_once_is_not_reached_any_more(
    experiment: Experiment, receiver: Receiver, settings: Any
) -> None:
    make(experiment, receiver.url)
    settings.WEBHOOK_HOSTS = []
    tell(experiment, 1)

    assert deliver_webhooks() == 0
    assert receiver.got == []
    assert "127.0.0.1 is a private address" in the_delivery().detail


def test_public_addresses() -> None:
    assert is_public(ipaddress.ip_address("8.8.8.8"))
    assert not is_public(ipaddress.ip_address("::ffff:10.0.0.1"))


def test_the_documented_receiver_verifies(experiment: Experiment, receiver: Receiver) -> None:
    code = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", code, re.S) if "verify" in each]
    names: dict[str, Any] = {}
    exec(block, names)
    _webhook, secret = create_webhook(experiment=experiment, url=receiver.url, kinds=[])
    tell(experiment, 1)
    assert deliver_webhooks() == 1
    ((headers, body),) = receiver.got

    assert names["verify"](body, headers, secret)["data"]["place"] == 1
    with pytest.raises(ValueError, match="not signed"):
        names["verify"](body + b" ", headers, secret)
    with pytest.raises(ValueError, match="not signed"):
        names["verify"](body, headers, "whsec_" + "b" * 44)
    with pytest.raises(ValueError, match="too old"):
        names["verify"](body, {**headers, "webhook-timestamp": "1700000000"}, secret)
