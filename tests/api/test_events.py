"""Server-sent events, over HTTP to a real ASGI server, from a real Valkey."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection

from prorl_site.stack.engines import Engines
from rollouts.api.views import events as views
from rollouts.api.views.events import Listeners
from rollouts.models import Experiment, TrainerToken
from rollouts.services import event_streams
from rollouts.services.events import EventKind, emit, flush_events, stream_key
from rollouts.services.tokens import revoke_token
from tests import factories
from tests.api.callers import Caller, assert_problem
from tests.api.live import eventually, served

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture
def store() -> Iterator[Any]:
    with redis.Redis.from_url(django_settings.BROKER_URL, decode_responses=True) as client:
        assert flush_events(20)
        client.flushall()
        yield client


@pytest.fixture
def experiment(transactional_db: None, trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


@pytest.fixture
def base(transactional_db: None) -> Iterator[str]:
    with served() as address:
        yield address
        eventually(lambda: Listeners.count == 0, "every listener has left")


@dataclass
class Heard:
    """One event as a listener gets it."""

    id: str
    kind: str
    data: dict[str, Any]


class Ear:
    """A listener: reads events, passing over comments."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.iter_lines()
        self.pings = 0

    def hear(self) -> Heard:
        """Return the next event."""
        fields: dict[str, str] = {}
        for line in self.lines:
            name, _, value = line.partition(": ")
            if line == "" and "data" in fields:
                return Heard(fields["id"], fields["event"], json.loads(fields["data"]))
            self.pings += line == ": ping"
            if name:
                fields[name] = value
        raise AssertionError("the stream ended")


@contextmanager
def listening(
    base: str, caller: Caller, experiment: Experiment, query: str = "", **headers: str
) -> Iterator[Ear]:
    """Listen from now on."""
    before = Listeners.count
    path = f"{base}/api/v1/experiments/{experiment.pk}/events/{query}"
    sent = {"Authorization": f"Bearer {caller.text}", "Accept": "text/event-stream"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx.Client(timeout=60) as client, client.stream("GET", path, headers=sent) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        ear = Ear(response)
        assert next(ear.lines) == "retry: 2000"
        eventually(lambda: Listeners.count > before, "the listener is there")
        yield ear


def tell(experiment: Experiment, *places: int, kind: str = EventKind.GROUP_READY) -> None:
    for place in places:
        emit(experiment.pk, kind, place=place)
    assert flush_events(20)


def blocked(store: Any, count: int) -> Callable[[], bool]:
    return lambda: store.info("clients")["blocked_clients"] == count


def test_events_arrive_in_order_with_ids_of_their_stream(
    base: str, store: Any, trainer: Caller, experiment: Experiment
) -> None:
    tell(experiment, 0)
    other = factories.make_experiment(owner=trainer.user)
    with listening(base, trainer, experiment) as ear:
        eventually(blocked(store, 1), "it waits for what comes")
        tell(other, 9)
        tell(experiment, 1, 2)
        tell(experiment, 3, kind=EventKind.BATCH_EXPIRED)
        heard = [ear.hear() for _ in range(3)]

    ids = [entry_id for entry_id, _ in store.xrange(stream_key(experiment.pk))]
    assert [each.id for each in heard] == ids[1:]
    assert [(each.kind, each.data["place"]) for each in heard] == [
        ("group.ready", 1),
        ("group.ready", 2),
        ("batch.expired", 3),
    ]
    assert heard[0].data["experiment"] == str(experiment.pk)
    eventually(blocked(store, 0), "the reader ended with its listener")


def test_only_the_kinds_that_are_asked_for(
    base: str, store: Any, trainer: Caller, experiment: Experiment
) -> None:
    with listening(base, trainer, experiment, "?kinds=counts,batch.leased") as ear:
        eventually(blocked(store, 1), "it waits for what comes")
        tell(experiment, 1)
        tell(experiment, 2, kind=EventKind.COUNTS)
        tell(experiment, 3, kind=EventKind.RESYNC)
        assert [ear.hear().data["place"] for _ in range(2)] == [2, 3]


def test_a_silent_stream_is_pinged(
    base: str, store: Any, trainer: Caller, experiment: Experiment, settings: Any
) -> None:
    settings.EVENTS_PING_SECONDS = 0.1
    with listening(base, trainer, experiment) as ear:
        eventually(lambda: next(ear.lines) == ": ping", "a ping")
        tell(experiment, 1)
        assert ear.hear().data["place"] == 1


def test_resuming_across_a_restart_of_the_web_process(
    store: Any, trainer: Caller, experiment: Experiment
) -> None:
    with served() as base, listening(base, trainer, experiment) as ear:
        eventually(blocked(store, 1), "it waits for what comes")
        tell(experiment, 1, 2)
        last = [ear.hear() for _ in range(2)][-1]
    eventually(lambda: Listeners.count == 0, "the listener has left")
    tell(experiment, 3, 4)

    with served() as base, listening(base, trainer, experiment, Last_Event_ID=last.id) as ear:
        tell(experiment, 5)
        assert [ear.hear().data["place"] for _ in range(3)] == [3, 4, 5]


@pytest.mark.parametrize("last", ["5-0", "99999999999999-0", "yesterday", "-1", "$"])
def test_an_id_that_is_not_kept_gets_a_resync_and_what_follows(
    base: str, store: Any, trainer: Caller, experiment: Experiment, last: str
) -> None:
    tell(experiment, 1)
    end = store.xinfo_stream(stream_key(experiment.pk))["last-generated-id"]
    with listening(base, trainer, experiment, Last_Event_ID=last) as ear:
        first = ear.hear()
        tell(experiment, 2)
        second = ear.hear()

    assert (first.kind, first.id) == ("resync", end)
    assert first.data["experiment"] == str(experiment.pk)
    assert (second.kind, second.data["place"]) == ("group.ready", 2)


def test_a_stream_that_was_cut_gives_a_resync(
    base: str, store: Any, trainer: Caller, experiment: Experiment, settings: Any
) -> None:
    tell(experiment, 0)
    seen = store.xinfo_stream(stream_key(experiment.pk))["last-generated-id"]
    settings.EVENTS_KEPT = 100
    tell(experiment, *range(1, 400))

    with listening(base, trainer, experiment, Last_Event_ID=seen) as ear:
        assert ear.hear().kind == "resync"
        tell(experiment, 400)
        assert ear.hear().data["place"] == 400


def test_a_stream_that_is_cut_while_it_is_followed_gives_a_resync(
    base: str, store: Any, trainer: Caller, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, at_pause = threading.Event(), threading.Event()

    class Slow(event_streams.Follower):
        async def _read(self) -> list[event_streams.Seen]:
            if at_pause.is_set():
                from asgiref.sync import sync_to_async

                await sync_to_async(go.wait, thread_sensitive=False)(60)
            return await super()._read()

    monkeypatch.setattr(views, "Follower", Slow)
    with listening(base, trainer, experiment) as ear:
        eventually(blocked(store, 1), "it waits for what comes")
        at_pause.set()
        tell(experiment, 1)
        assert ear.hear().data["place"] == 1
        tell(experiment, 2, 3, 4)
        store.xtrim(stream_key(experiment.pk), maxlen=1, approximate=False)
        go.set()
        assert ear.hear().kind == "resync"
        tell(experiment, 5)
        assert ear.hear().data["place"] == 5


def test_a_store_that_stops_ends_no_stream_and_what_it_lost_is_told(
    base: str, trainer: Caller, experiment: Experiment, engines: Engines, store: Any
) -> None:
    with listening(base, trainer, experiment) as ear:
        eventually(blocked(store, 1), "it waits for what comes")
        tell(experiment, 1)
        assert ear.hear().data["place"] == 1
        store.client_kill_filter(_type="normal", skipme=True)
        store.delete(stream_key(experiment.pk))
        assert ear.hear().kind == "resync"
        eventually(lambda: _told(experiment), "it is written again")
        assert ear.hear().data["place"] == 2


def _told(experiment: Experiment) -> bool:
    """Emit until the store took one: a connection that was cut loses what it was to carry."""
    emit(experiment.pk, EventKind.GROUP_READY, place=2)
    return flush_events(1)


def test_many_listeners_hold_no_threads_and_no_database_connections(
    base: str, store: Any, trainer: Caller, experiment: Experiment
) -> None:
    with ExitStack() as stack:
        stack.enter_context(listening(base, trainer, experiment))
        eventually(blocked(store, 1), "one waits")
        threads = _threads()
        ears = [stack.enter_context(listening(base, trainer, experiment)) for _ in range(20)]
        eventually(blocked(store, 21), "all wait")
        connection.close()
        held = connection.pool.get_stats()
        tell(experiment, 1)

        assert [ear.hear().data["place"] for ear in ears] == [1] * 20
        assert _threads() == threads
        assert held["pool_available"] == held["pool_size"]
    eventually(blocked(store, 0), "the readers ended with their listeners")


def _threads() -> int:
    """Return how many threads there are beside the event loop's own pool, which is bounded."""
    return sum(not each.name.startswith("asyncio_") for each in threading.enumerate())


def test_one_listener_too_many(
    base: str, store: Any, trainer: Caller, experiment: Experiment, settings: Any
) -> None:
    settings.EVENTS_LISTENERS = 1
    with listening(base, trainer, experiment):
        refused = httpx.get(
            f"{base}/api/v1/experiments/{experiment.pk}/events/",
            headers={"Authorization": f"Bearer {trainer.text}"},
        )
    assert (refused.status_code, refused.json()["code"]) == (503, "events.too_many")
    assert refused.headers["Retry-After"] == "30"


def test_a_revoked_token_hears_no_more(
    base: str,
    store: Any,
    trainer: Caller,
    experiment: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:
    settings.EVENTS_PING_SECONDS = 0.1
    monkeypatch.setattr(views, "CHECK_SECONDS", 0.0)
    with listening(base, trainer, experiment) as ear:
        tell(experiment, 1)
        assert ear.hear().data["place"] == 1
        revoke_token(token=TrainerToken.objects.get(user=trainer.user))
        for line in ear.lines:
            assert not line.startswith("data")
    eventually(lambda: Listeners.count == 0, "the listener is gone")


def test_who_may_listen(
    anybody: Caller,
    stranger: Caller,
    trainer: Caller,
    make_caller: Callable[..., Caller],
    experiment: Experiment,
) -> None:
    path = f"experiments/{experiment.pk}/events/"
    assert_problem(anybody.call("GET", path), 401, "auth.missing")
    assert_problem(stranger.call("GET", path), 404, "not_found")
    blind = make_caller(trainer.user, scopes=["submit"])
    assert_problem(blind.call("GET", path), 403, "auth.forbidden")
    other = factories.make_experiment(owner=trainer.user)
    bound = make_caller(trainer.user, experiments=[other])
    assert_problem(bound.call("GET", path), 404, "not_found")
    assert_problem(trainer.call("POST", path, {}), 405, "request.method")
    assert_problem(trainer.call("GET", path + "?kinds=all"), 400, "request.invalid")
    wrong = trainer.call("GET", path, Accept="application/json")
    assert "text/event-stream" in assert_problem(wrong, 406, "request.not_acceptable")["detail"]
