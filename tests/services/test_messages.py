"""Publishing costs its callers nothing, whatever the broker does."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
import redis
from celery import current_app
from django.conf import settings
from django.db import transaction

from prorl_site.stack.engines import Engines
from rollouts.services import messages
from rollouts.services.messages import (
    Message,
    Publisher,
    publish_attempt,
    publish_dispatch,
    publish_sweep,
)

pytestmark = pytest.mark.django_db(transaction=True)

HINT = Message("rollouts.tasks.control_dispatch", (), "control", None, 60.0)


@pytest.fixture
def broker() -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(settings.BROKER_URL) as client:
        assert messages.flush(10)
        client.flushall()
        yield client


def attempt_message() -> Message:
    return Message("rollouts.tasks.run_init", (str(uuid.uuid4()),), "init", None)


class Held(Publisher):
    """A real publisher whose sending waits for a word."""

    def __init__(self, limit: int = 10) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        super().__init__(current_app._get_current_object(), limit=limit)

    def _send(self, message: Message) -> None:
        self.entered.set()
        assert self.go.wait(30)
        super()._send(message)


def test_messages_arrive_after_the_commit_and_hints_expire(broker: "redis.Redis") -> None:
    attempt = uuid.uuid4()
    with transaction.atomic():
        publish_attempt(attempt_id=attempt, stage="init", node="n1")
        publish_sweep(node="n1")
        publish_dispatch()
        assert messages.flush(10)
        assert broker.keys("init*") == []
    assert messages.flush(10)

    sent = [json.loads(raw)["headers"] for raw in reversed(broker.lrange("init.n1", 0, -1))]
    assert [(each["task"], each["expires"] is None) for each in sent] == [
        ("rollouts.tasks.run_init", True),
        ("rollouts.tasks.sweep_node", False),
    ]
    (dispatch,) = [json.loads(raw)["headers"] for raw in broker.lrange("control", 0, -1)]
    assert dispatch["task"] == "rollouts.tasks.control_dispatch"
    assert dispatch["expires"] is not None


def test_nothing_is_published_by_a_transaction_that_fails(broker: "redis.Redis") -> None:
    with transaction.atomic():
        publish_dispatch()
        transaction.set_rollback(True)
    assert messages.flush(10)
    assert broker.llen("control") == 0


def test_equal_hints_that_wait_are_sent_once(broker: "redis.Redis") -> None:
    publisher = Held()
    publisher.put(HINT)
    assert publisher.entered.wait(10)
    for _ in range(200):
        publisher.put(HINT)
    publisher.go.set()

    assert publisher.flush(10)
    # One was on its way while the others came: it may have been read before them.
    assert broker.llen("control") == 2


def test_a_full_queue_drops_with_one_line(
    broker: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Held(limit=3)
    publisher.put(attempt_message())
    assert publisher.entered.wait(10)
    for _ in range(8):
        publisher.put(attempt_message())
    warned = [each.levelname for each in caplog.records]
    publisher.go.set()

    assert publisher.flush(10)
    assert warned == ["WARNING"]
    assert broker.llen("init") == 4


def test_a_broker_that_is_away_costs_one_line_and_publishing_goes_on_after_it(
    broker: "redis.Redis", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollouts.services.messages")
    publisher = Publisher(current_app._get_current_object())
    real = Publisher._send

    def refused(self: Publisher, message: Message) -> None:
        with current_app.connection_for_write("redis://127.0.0.1:1/0") as link:
            link.ensure_connection(max_retries=1, interval_start=0)

    monkeypatch.setattr(Publisher, "_send", refused)
    for _ in range(3):
        publisher.put(attempt_message())
        assert publisher.flush(20)
    monkeypatch.setattr(Publisher, "_send", real)
    publisher.put(HINT)

    assert publisher.flush(20)
    assert broker.llen("control") == 1
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[1].getMessage().endswith("3 were dropped")


def test_a_frozen_broker_holds_no_caller_and_no_transaction(
    broker: "redis.Redis", engines: Engines
) -> None:
    publish_dispatch()
    assert messages.flush(10)  # its connection is warm
    os.kill(engines.broker_pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            with transaction.atomic():
                publish_dispatch()
                publish_attempt(attempt_id=uuid.uuid4(), stage="run", node=None)
        stuck = not messages.flush(0.2)
    finally:
        os.kill(engines.broker_pid, signal.SIGCONT)

    assert stuck
    assert messages.flush(90)
    publish_dispatch()
    assert messages.flush(20)
    assert broker.llen("control") >= 1


def test_a_forked_process_has_a_publisher_of_its_own(broker: "redis.Redis") -> None:
    code = (
        "import os, django; django.setup()\n"
        "from rollouts.services import messages\n"
        "first = messages.Message('rollouts.tasks.sweep_node', ('a',), 'init', 'a')\n"
        "messages.publisher().put(first)\n"
        "assert messages.flush(20)\n"
        "child = os.fork()\n"
        "put = messages.publisher().put\n"
        "put(messages.Message('rollouts.tasks.sweep_node', ('b',), 'init', 'b'))\n"
        "if not child: os._exit(0 if messages.flush(20) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    run_python(code)

    assert (broker.llen("init.a"), broker.llen("init.b")) == (1, 2)


def test_a_short_command_sends_what_it_published_before_it_ends(broker: "redis.Redis") -> None:
    run_python(
        "import django; django.setup()\n"
        "from rollouts.services import messages\n"
        "messages.publish_dispatch()\n"
    )
    assert broker.llen("control") == 1


def run_python(code: str) -> None:
    """Run a program with the settings of these tests; autocommit, so nothing needs a commit."""
    names = {
        "DJANGO_SETTINGS_MODULE": "prorl_site.settings.base",
        "DATABASE_URL": os.environ.get("DATABASE_URL", ""),
        "BROKER_URL": settings.BROKER_URL,
    }
    environment = {**os.environ, **{name: value for name, value in names.items() if value}}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_flush_ends_when_its_time_is_over() -> None:
    publisher = Held()
    publisher.put(HINT)
    assert publisher.entered.wait(10)
    began = time.monotonic()

    assert publisher.flush(0.1) is False
    assert time.monotonic() - began >= 0.1
    publisher.go.set()
    assert publisher.flush(20) is True


def test_every_beat_message_expires() -> None:
    kept = {
        name: each["options"]["expires"] for name, each in settings.CELERY_BEAT_SCHEDULE.items()
    }
    assert kept == {
        "dispatch": 5.0,
        "reap": 10.0,
        "sweep": 60.0,
        "check-servers": 15.0,
        "policy-updates": 5.0,
        "feed": 5.0,
        "webhooks": 5.0,
    }
