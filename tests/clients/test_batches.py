"""Leasing batches: formats, waiting, acknowledging, giving back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prorl_client import (
    Client,
    Experiment,
    LeaseExpired,
    NothingLeft,
    UnreadableContent,
    WaitTimedOut,
)

from tests.clients import shapes
from tests.clients.conftest import PLAIN, QUICK
from tests.clients.scripted import BROKEN, Reply, Scripted, page, problem

EMPTY = Reply(204)
ACK, NACK = f"/batches/{shapes.BATCH}/ack/", f"/batches/{shapes.BATCH}/nack/"
CLOSED = Reply(body=shapes.batch(state="acknowledged"))
EXPERIMENT = "/experiments/e1/"


@pytest.fixture
def experiment(service: Scripted, client: Client) -> Experiment:
    service.on("GET", EXPERIMENT, Reply(body=shapes.experiment()))
    service.on("POST", ACK, CLOSED)
    service.on("POST", NACK, CLOSED)
    return client.experiment("e1")


@pytest.mark.parametrize("kind", ["arrow", "ndjson", "json"])
def test_batch_is_the_same_in_every_format(service: Scripted, kind: str) -> None:
    if kind == "arrow":
        pytest.importorskip("pyarrow")
    made = [
        shapes.trajectory(0, segments=[shapes.segment(5), shapes.segment(2, number=1)]),
        shapes.trajectory(1, segments=[], reward=None, outcome="infra_failed", trainable=False),
        shapes.trajectory(2, group="g2", segments=[shapes.segment(3)]),
    ]
    reply = {
        "arrow": shapes.arrow_batch,
        "ndjson": shapes.ndjson_batch,
        "json": shapes.json_batch,
    }[kind](*made)
    service.on("POST", shapes.BATCHES, reply)
    service.on("GET", EXPERIMENT, Reply(body=shapes.experiment()))
    service.on("GET", "/batches/", page(shapes.batch(id="other"), shapes.batch()))
    with Client(
        service.url, "secret", retries=QUICK, use_arrow=kind == "arrow", http_options=PLAIN
    ) as client:
        batch = client.experiment("e1").lease(groups=2)

    assert (batch.id, batch.policy_version, batch.number) == (shapes.BATCH, 4, 1)
    assert [[each.sample for each in group] for group in batch.groups] == [[0, 1], [2]]
    assert [len(each.segments) for each in batch] == [2, 0, 1]
    for found, whole in zip(batch, made, strict=True):
        assert (found.reward, found.outcome, found.trainable) == (
            whole["reward"],
            whole["outcome"],
            whole["trainable"],
        )
        assert (found.first_version, found.last_version) == (3, 4)
        assert found.rewards == {"exact": 1.0}
        for segment, expected in zip(found.segments, whole["segments"], strict=True):
            shapes.same_tokens(segment, expected)
            turn = segment.turns[0]
            assert vars(turn) == expected["turns"][0]
            assert segment.sampling == {"temperature": 1.0}
            assert not segment.response_ids.flags.writeable
    assert batch.trajectories[0].sampled_tokens == 5
    accept = service.calls("POST", shapes.BATCHES)[0].headers["accept"]
    assert ("arrow" in accept) is (kind == "arrow")


def test_arrow_arrays_are_views_of_the_answer() -> None:
    pytest.importorskip("pyarrow")
    from prorl_client.arrow import read_batch

    body = bytearray(shapes.arrow_stream(shapes.batch(), [shapes.trajectory(0)]))
    before = np.frombuffer(body, np.uint8)
    segment = read_batch(body)[1][0].segments[0]

    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
        assert np.shares_memory(getattr(segment, name), before), name


def test_arrow_stream_that_was_cut_anywhere_is_no_batch() -> None:
    pytest.importorskip("pyarrow")
    from prorl_client.arrow import read_batch

    made = [shapes.trajectory(0), shapes.trajectory(1)]
    whole = shapes.arrow_stream(shapes.batch(), made)
    assert len(read_batch(whole)[1]) == 2

    for length in range(0, len(whole), 8):
        with pytest.raises(UnreadableContent):
            read_batch(whole[:length])


def test_segment_whose_arrays_disagree_is_refused() -> None:
    from prorl_client.trajectories import Segment

    for name in ("response_mask", "response_logprobs"):
        broken = {**shapes.segment(3), name: [0]}
        with pytest.raises(UnreadableContent, match="different lengths"):
            Segment.parse(broken)
    with pytest.raises(UnreadableContent, match="different lengths"):
        Segment.parse({**shapes.segment(3), "policy_versions": [[3, 2]]})


def test_wait_goes_on_with_the_same_key_until_a_batch_comes(
    service: Scripted, experiment: Experiment
) -> None:
    service.on("POST", shapes.BATCHES, EMPTY, EMPTY, shapes.json_batch(shapes.trajectory(0)))

    batch = experiment.lease(groups=1, max_policy_lag=2)

    asked = service.calls("POST", shapes.BATCHES)
    assert len(batch) == 1
    assert len({each.key for each in asked}) == 1
    wanted = {"groups": 1, "wait_seconds": 45.0, "max_policy_lag": 2}
    assert [each.body for each in asked] == [wanted] * 3


def test_lost_answer_is_asked_for_again_and_not_leased_anew(
    service: Scripted, experiment: Experiment
) -> None:
    good = shapes.json_batch(shapes.trajectory(0))
    cut = Reply(body=good.body, headers=good.headers, cut=40)
    service.on("POST", shapes.BATCHES, cut, problem(409, "idempotency.running"), good)

    experiment.lease(groups=1)

    assert len({each.key for each in service.calls("POST", shapes.BATCHES)}) == 1


def test_lease_that_ran_out_before_its_answer_came_is_leased_anew(
    service: Scripted, experiment: Experiment
) -> None:
    service.on(
        "POST",
        shapes.BATCHES,
        BROKEN,
        problem(410, "batch.expired"),
        shapes.json_batch(shapes.trajectory(0)),
    )

    experiment.lease(groups=1)

    first, second, third = service.calls("POST", shapes.BATCHES)
    assert first.key == second.key != third.key


def test_wait_that_ends(service: Scripted, experiment: Experiment) -> None:
    service.on("POST", shapes.BATCHES, EMPTY)

    with pytest.raises(WaitTimedOut, match="Fewer than 3 groups"):
        experiment.lease(groups=3, timeout=0.0)

    asked = service.calls("POST", shapes.BATCHES)
    assert [each.body["wait_seconds"] for each in asked] == [0.0]


def test_iteration_acknowledges_where_the_trainer_says_so(
    service: Scripted, experiment: Experiment
) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))

    for number, batch in enumerate(experiment.batches(groups=1, limit=3)):
        if number != 1:
            batch.ack()

    assert len(service.calls("POST", shapes.BATCHES)) == 3
    assert len(service.calls("POST", ACK)) == 2
    assert service.calls("POST", NACK) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "stopped", "coming": {"open": 5, "ready": 5}},
        {"exhausted": True, "coming": {"open": 0, "ready": 0}},
        {"exhausted": True, "coming": {"open": 0, "ready": 1}},
    ],
    ids=["stopped", "used up", "one left"],
)
def test_iteration_ends_when_no_batch_can_come(
    service: Scripted, experiment: Experiment, changes: dict[str, Any]
) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)), EMPTY)
    service.on("GET", EXPERIMENT, Reply(body=shapes.experiment(**changes)))

    assert len(list(experiment.batches(groups=2))) == 1
    with pytest.raises(NothingLeft):
        experiment.lease(groups=2)


def test_iteration_goes_on_while_enough_is_coming(
    service: Scripted, experiment: Experiment
) -> None:
    good = shapes.json_batch(shapes.trajectory(0))
    coming = {"open": 1, "ready": 1}
    service.on("POST", shapes.BATCHES, EMPTY, good)
    service.on("GET", EXPERIMENT, Reply(body=shapes.experiment(exhausted=True, coming=coming)))

    assert len(list(experiment.batches(groups=2, limit=1))) == 1


def test_context_acknowledges_at_its_end(service: Scripted, experiment: Experiment) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))

    with experiment.lease(groups=1):
        assert service.calls("POST", ACK) == []

    assert len(service.calls("POST", ACK)) == 1
    assert service.calls("POST", NACK) == []


def test_context_gives_back_after_an_exception(service: Scripted, experiment: Experiment) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))
    service.on("POST", NACK, problem(409, "batch.expired"))

    with pytest.raises(ZeroDivisionError), experiment.lease(groups=1):
        raise ZeroDivisionError

    assert len(service.calls("POST", NACK)) == 1
    assert service.calls("POST", ACK) == []


def test_batch_closed_inside_its_context_is_closed_once(
    service: Scripted, experiment: Experiment
) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))

    with experiment.lease(groups=1) as batch:
        batch.nack()
    with experiment.lease(groups=1) as batch:
        batch.ack()

    assert (len(service.calls("POST", ACK)), len(service.calls("POST", NACK))) == (1, 1)


def test_acknowledging_too_late(service: Scripted, experiment: Experiment) -> None:
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))
    service.on("POST", ACK, problem(409, "batch.expired", "The lease has expired."))

    with pytest.raises(LeaseExpired, match="Drop what you computed"):
        experiment.lease(groups=1).ack()


def test_batch_is_read_again_by_its_id(service: Scripted, client: Client) -> None:
    reply = shapes.ndjson_batch(shapes.trajectory(0), shapes.trajectory(1))
    service.on("GET", f"/batches/{shapes.BATCH}/", reply)
    service.on("GET", "/batches/", page(shapes.batch()))

    batch = client.batch(shapes.BATCH)

    assert [each.sample for each in batch] == [0, 1]
    assert service.calls("POST", ACK) == []


def test_ids_cannot_leave_their_place_in_the_address(service: Scripted, client: Client) -> None:
    service.on("GET", "/batches/..%2F..%2Fadmin%3F/", problem(404, "not_found"))

    with pytest.raises(Exception, match="not_found"):
        client.batch("../../admin?")

    assert [each.path for each in service.asked] == ["/batches/..%2F..%2Fadmin%3F/"]
