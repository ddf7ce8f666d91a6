"""Inference servers: how often the database is asked, and how long their checks may take."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollouts.inference.exceptions import NoServer
from rollouts.inference.pool import InferencePool
from rollouts.inference.protocol import Health, SamplingParams, Server
from rollouts.models import InferenceServer, Policy
from rollouts.services import routable
from rollouts.services import servers as servers_module
from rollouts.services.routable import routable_servers
from rollouts.services.servers import (
    adapters,
    check_servers,
    clear_servers,
    register_server,
)
from rollouts.stages.policy_view import PolicyView
from tests.services.line import make_experiment

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def policy() -> Policy:
    return make_experiment().policy


@pytest.fixture
def silent() -> Iterator[str]:
    """Return where connections are taken and nothing is ever answered."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class Meeting:
    """An adapter that answers only when all servers are asked at the same time."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)

    def health(self, server: Server, **_: float) -> Health:
        self.barrier.wait(timeout=20)
        return Health(ok=True, detail=server.url)


def test_servers_are_checked_at_the_same_time(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        register_server(policy=policy, url=f"http://127.0.0.1:9/{number}")
    meeting = Meeting(8)
    monkeypatch.setattr(servers_module, "adapters", lambda: {"vllm": meeting})

    assert check_servers() == 8

    rows = InferenceServer.objects.all()
    assert {(row.healthy, row.detail == row.url, row.checked_at is None) for row in rows} == {
        (True, True, False)
    }


def test_no_connection_is_held_while_servers_are_asked(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9")
    mine, open_then = connection, []

    class Looking:
        def health(self, server: Server, **_: float) -> Health:
            open_then.append(held is not None)
            return Health(ok=True, detail=server.url)

    closes = []
    real = servers_module.release_connection
    held: Any = object()

    def release() -> None:
        nonlocal held
        real()
        held = mine.connection
        closes.append(held)

    monkeypatch.setattr(servers_module, "release_connection", release)
    monkeypatch.setattr(servers_module, "adapters", lambda: {"vllm": Looking()})

    assert check_servers() == 1
    assert (open_then, closes) == ([False], [None])


def test_a_round_ends_although_servers_are_silent_and_the_rest_comes_next(
    policy: Policy, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "ROUND_SECONDS", 0.3)
    monkeypatch.setattr(servers_module, "HEALTH_TIMEOUT_SECONDS", 0.6)
    register_server(policy=policy, url=silent)
    assert check_servers() == 0
    assert InferenceServer.objects.get().checked_at is None

    monkeypatch.setattr(servers_module, "ROUND_SECONDS", 20)
    assert check_servers() == 0
    row = InferenceServer.objects.get()
    assert (row.healthy, row.checked_at is None) == (False, False)
    assert row.detail


def test_one_round_at_a_time(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9")
    asked: list[int] = []

    class Nested:
        def health(self, server: Server, **_: float) -> Health:
            asked.append(1)
            assert check_servers() == 0
            return Health(ok=True, detail=server.url)

    monkeypatch.setattr(servers_module, "adapters", lambda: {"vllm": Nested()})

    assert check_servers() == 1
    assert check_servers() == 1
    assert asked == [1, 1]


def test_a_server_of_an_unknown_kind_does_not_hide_the_others(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9/a")
    other = register_server(policy=policy, url="http://127.0.0.1:9/b")
    InferenceServer.objects.filter(pk=other.pk).update(kind="of-a-newer-version")

    assert check_servers() == 0
    details = dict(InferenceServer.objects.values_list("url", "detail"))
    assert "of-a-newer-version" in details["http://127.0.0.1:9/b"]
    assert details["http://127.0.0.1:9/a"]


def test_who_waits_for_a_slot_shares_what_the_process_read(policy: Policy) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9")
    began = time.monotonic()
    with CaptureQueriesContext(connection) as queries:
        first = routable_servers(policy=policy, since=began)
        others = [routable_servers(policy=policy, since=began) for _ in range(20)]
    spent = time.monotonic() - began
    assert len(queries) == 1 + int(spent / routable.LISTED_SECONDS)
    assert {each.servers for each in others} == {first.servers}

    with CaptureQueriesContext(connection) as queries:
        routable_servers(policy=policy, since=time.monotonic())
    assert len(queries) == 1


def test_a_new_request_sees_the_new_version_and_the_new_servers(policy: Policy) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9")
    assert routable_servers(policy=policy, since=time.monotonic()).version == policy.version
    Policy.objects.filter(pk=policy.pk).update(version=7)
    register_server(policy=policy, url="http://127.0.0.1:10")

    found = routable_servers(policy=policy, since=time.monotonic())
    assert (found.version, len(found.servers)) == (7, 2)

    clear_servers(policies=[policy])
    found = routable_servers(policy=policy, since=time.monotonic())
    assert (found.version, found.servers) == (7, ())


def test_a_rollout_that_waits_for_a_slot_asks_the_database_seldom(policy: Policy) -> None:
    register_server(policy=policy, url="http://127.0.0.1:9")

    class Full:
        def wait(self, *_: Any, **__: Any) -> None:
            return None

        def leave(self, *_: Any) -> None:
            return None

    view = PolicyView(policy)
    began = time.monotonic()
    view.begin_anew()
    polls: list[int] = []

    def listed() -> list[Server]:
        polls.append(1)
        return view.servers()

    pool = InferencePool(Full(), adapters(), listed)  # type: ignore[arg-type]
    with ExitStack() as stack:
        queries = stack.enter_context(CaptureQueriesContext(connection))
        stack.enter_context(pytest.raises(NoServer))
        pool.generate("r", [1], SamplingParams(max_tokens=4), budget_seconds=1.5)
    spent = time.monotonic() - began

    assert len(polls) > 4
    assert 1 <= len(queries) <= 1 + spent / routable.LISTED_SECONDS
    assert view.version == policy.version
