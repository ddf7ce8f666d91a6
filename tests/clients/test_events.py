"""Events: read from any chunks, resumed after faults."""

from __future__ import annotations

from itertools import islice

import pytest
from prorl_client import AuthError, Client, Experiment
from prorl_client.lines import LineBuffer
from prorl_client.sse import EventParser

from tests.clients import shapes
from tests.clients.scripted import BROKEN, Reply, Scripted, problem

EVENTS = "/experiments/e1/events/"
STREAM = (
    b"retry: 2000\n: events follow\n\n"
    b'id: 1-0\nevent: group.ready\ndata: {"kind":"group.ready","at":"2026-11-30T10:00:00Z",'
    b'"experiment":"e1","group":"g1"}\n\n'
    b": ping\n\n"
    b'id: 2-0\nevent: counts\ndata: {"kind":"counts",\ndata: "queued":3}\n\n'
)


def stream(body: bytes, *, cut: int | None = None) -> Reply:
    return Reply(body=body, content_type="text/event-stream", cut=cut)


@pytest.fixture
def experiment(service: Scripted, client: Client) -> Experiment:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    return client.experiment("e1")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(size: int, end: bytes) -> None:
    content = STREAM.replace(b"\n", end)
    parser = EventParser()

    events = [
        event
        for place in range(0, len(content), size)
        for event in parser.feed(content[place : place + size])
    ]

    assert [(each.id, each.kind) for each in events] == [("1-0", "group.ready"), ("2-0", "counts")]
    assert events[0].values == {"group": "g1"}
    assert events[0].experiment == "e1"
    assert events[0].at is not None
    assert events[1].values == {"queued": 3}
    assert parser.last_id == "2-0"


def test_line_separators_of_unicode_are_no_line_ends() -> None:
    line = 'data: {"kind":"x","text":"a\u2028bc\x85d"}'.encode()

    assert LineBuffer().feed(line + b"\nrest") == [line]
    (event,) = EventParser().feed(line + b"\n\n")
    assert event.values["text"] == "a\u2028bc\x85d"


@pytest.mark.parametrize("data", [b"data: no json", b"data: [1]", b"event: x", b"data"])
def test_event_of_another_form_does_not_end_the_stream(data: bytes) -> None:
    parser = EventParser()

    parser.feed(data + b"\n\n")
    (event,) = parser.feed(b'data: {"kind":"counts"}\n\n')

    assert event.kind == "counts"


def test_stream_is_resumed_after_the_last_event(service: Scripted, experiment: Experiment) -> None:
    half = STREAM.index(b": ping")
    resync = b'id: 9-0\nevent: resync\ndata: {"kind":"resync"}\n\n'
    service.on(
        "GET",
        EVENTS,
        stream(STREAM, cut=half),
        BROKEN,
        problem(503, "events.too_many", retry_after=0),
        stream(STREAM[half:]),
        stream(resync),
    )

    events = list(islice(experiment.events(kinds=["group.ready", "counts"]), 3))

    asked = service.calls("GET", EVENTS)
    assert [each.kind for each in events] == ["group.ready", "counts", "resync"]
    resumed = [each.headers.get("last-event-id") for each in asked]
    assert resumed == [None, "1-0", "1-0", "1-0", "2-0"]
    assert {each.query["kinds"][0] for each in asked} == {"group.ready,counts"}
    assert asked[0].headers["accept"] == "text/event-stream"


def test_stream_begins_after_an_event_that_is_known(
    service: Scripted, experiment: Experiment
) -> None:
    service.on("GET", EVENTS, stream(STREAM))

    next(iter(experiment.events("0-7")))

    assert service.calls("GET", EVENTS)[0].headers["last-event-id"] == "0-7"


def test_refusal_ends_the_stream(service: Scripted, experiment: Experiment) -> None:
    service.on("GET", EVENTS, stream(STREAM), problem(401, "auth.invalid"))

    events = experiment.events()

    assert len(list(islice(events, 2))) == 2
    with pytest.raises(AuthError):
        next(events)
