"""Events in the broker's store: after the commit, in order, and never at their caller's cost."""

import json
import os
import signal
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from prorl_site.stack.engines import Engines
from rollouts.models import Batch
from rollouts.services import events
from rollouts.services.batches import (
    acknowledge_batch,
    expire_batches,
    lease_batch,
    return_batch,
)
from rollouts.services.cancel import cancel_group, stop_experiment
from rollouts.services.end import end_rollout
from rollouts.services.event_counts import tell_counts
from rollouts.services.event_streams import Kept, end_of, is_id, is_lost, read_after
from rollouts.services.events import (
    EventKind,
    EventWriter,
    emit,
    emit_policy_version,
    flush_events,
    make_event,
    stream_key,
)
from rollouts.services.policies import update_policy
from tests import factories


@pytest.fixture
def store(transactional_db: None) -> Iterator[Any]:
    with redis.Redis.from_url(settings.BROKER_URL, decode_responses=True) as client:
        assert flush_events(20)
        client.flushall()
        yield client


def told(store: Any, experiment_id: uuid.UUID) -> list[dict[str, Any]]:
    return [json.loads(fields["data"]) for _, fields in store.xrange(stream_key(experiment_id))]


def test_events_are_written_after_the_commit_in_order(store: Any) -> None:
    experiment, group = uuid.uuid4(), uuid.uuid4()
    with transaction.atomic():
        emit(experiment, EventKind.GROUP_READY, group=group, rewards=[1.0, None])
        emit(experiment, "batch.leased", batch=group, groups=2)
        assert flush_events(10)
        assert told(store, experiment) == []

    assert flush_events(10)
    first, second = told(store, experiment)
    assert first.pop("at") <= second.pop("at")
    assert first == {
        "kind": "group.ready",
        "experiment": str(experiment),
        "group": str(group),
        "rewards": [1.0, None],
    }
    assert second == {
        "kind": "batch.leased",
        "experiment": str(experiment),
        "batch": str(group),
        "groups": 2,
    }
    assert 0 < store.ttl(stream_key(experiment)) <= events.KEPT_SECONDS


def test_a_transaction_that_fails_tells_nothing(store: Any) -> None:
    experiment = uuid.uuid4()
    with transaction.atomic():
        emit(experiment, EventKind.GROUP_READY)
        transaction.set_rollback(True)

    assert flush_events(10)
    assert told(store, experiment) == []


def test_a_kind_that_is_none_is_refused_at_once(store: Any) -> None:
    with pytest.raises(ValueError, match=r"group\.read"):
        emit(uuid.uuid4(), "group.read")


def test_a_policy_tells_each_of_its_experiments_that_are_not_stopped(store: Any) -> None:
    policy = factories.make_policy()
    active, paused, stopped = (
        factories.make_experiment(policy=policy, state=state)
        for state in ("active", "paused", "stopped")
    )
    other = factories.make_experiment()

    emit_policy_version(policy.pk, 4)

    assert flush_events(10)
    for experiment in (active, paused):
        (event,) = told(store, experiment.pk)
        assert (event["kind"], event["policy"], event["version"]) == (
            "policy.version",
            str(policy.pk),
            4,
        )
    assert told(store, stopped.pk) == told(store, other.pk) == []


def test_a_store_that_was_away_costs_one_line_and_makes_a_resync(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.05)
    one, two = sorted((uuid.uuid4(), uuid.uuid4()))
    gone = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1)
    writer = EventWriter(gone)
    for _ in range(3):
        writer.put(make_event(one, EventKind.GROUP_READY))
    writer.put(make_event(two, EventKind.GROUP_READY))
    assert not writer.flush(0.5)
    writer._store = store
    assert writer.flush(20)
    writer.put(make_event(one, EventKind.COUNTS))
    assert writer.flush(20)

    assert [each["kind"] for each in told(store, one)] == ["resync", "counts"]
    assert [each["kind"] for each in told(store, two)] == ["resync"]
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_frozen_store_holds_no_caller_and_no_transaction(store: Any, engines: Engines) -> None:
    experiment = uuid.uuid4()
    emit(experiment, EventKind.GROUP_READY)
    assert flush_events(10)  # its connection is warm
    os.kill(engines.broker_pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            with transaction.atomic():
                emit(experiment, EventKind.GROUP_READY)
        stuck = not flush_events(0.2)
    finally:
        os.kill(engines.broker_pid, signal.SIGCONT)

    assert stuck
    emit(experiment, EventKind.COUNTS)
    assert flush_events(60)
    # Those on their way may have arrived, or are told of by a resync.
    kinds = [each["kind"] for each in told(store, experiment)]
    assert kinds[0] == "group.ready"
    assert kinds.count("group.ready") == 51 or "resync" in kinds


def test_too_many_that_wait_are_dropped_with_a_resync(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.05)
    experiment = uuid.uuid4()
    gone = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1)
    writer = EventWriter(gone, limit=5)
    for _ in range(50):
        writer.put(make_event(experiment, EventKind.GROUP_READY))
    writer._store = store

    assert writer.flush(20)
    kinds = [each["kind"] for each in told(store, experiment)]
    assert "resync" in kinds
    assert len(kinds) < 50


def test_a_stream_that_refuses_holds_up_no_other(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.05)
    bad, good = uuid.uuid4(), uuid.uuid4()
    store.set(stream_key(bad), "no stream")
    writer = EventWriter(store)
    writer.put(make_event(bad, EventKind.COUNTS))
    writer.put(make_event(good, EventKind.COUNTS))
    assert not writer.flush(0.5)

    assert [each["kind"] for each in told(store, good)] == ["counts"]
    store.delete(stream_key(bad))
    assert writer.flush(20)
    assert [each["kind"] for each in told(store, bad)] == ["resync"]
    assert [each.levelname for each in caplog.records] == ["WARNING"]


def test_a_stream_keeps_the_newest(store: Any, settings: Any) -> None:
    settings.EVENTS_KEPT = 100
    experiment = uuid.uuid4()
    for place in range(1000):
        emit(experiment, EventKind.COUNTS, place=place)
    assert flush_events(20)

    kept = told(store, experiment)
    # Valkey cuts whole nodes of 100 entries.
    assert 100 <= len(kept) <= 200
    assert [each["place"] for each in kept] == list(range(1000 - len(kept), 1000))


def test_reading_goes_on_after_an_event_and_tells_what_is_lost(store: Any, settings: Any) -> None:
    experiment = uuid.uuid4()
    assert end_of(experiment) == "0-0"
    assert read_after(experiment, "0-0", limit=10) == []
    for place in range(3):
        emit(experiment, EventKind.COUNTS, place=place)
    assert flush_events(10)

    seen = read_after(experiment, "0-0", limit=10)
    assert [json.loads(each.data)["place"] for each in seen] == [0, 1, 2]
    assert read_after(experiment, seen[0].id, limit=1) == [seen[1]]
    assert end_of(experiment) == seen[2].id
    assert read_after(experiment, seen[2].id, limit=10) == []

    settings.EVENTS_KEPT = 100
    for place in range(1000):
        emit(experiment, EventKind.COUNTS, place=place)
    assert flush_events(20)
    (lost,) = read_after(experiment, seen[2].id, limit=10)
    assert (lost.kind, lost.id) == ("resync", end_of(experiment))


@pytest.mark.parametrize(
    ("kept", "position", "lost"),
    [
        (None, "0-0", False),
        (None, "5-1", True),
        (Kept("5-0", "9-0", trimmed=False), "0-0", False),
        (Kept("5-0", "9-0", trimmed=True), "0-0", True),
        (Kept("5-0", "9-0", trimmed=False), "4-0", True),
        (Kept("5-0", "9-0", trimmed=True), "5-0", False),
        (Kept("5-0", "9-0", trimmed=True), "9-0", False),
        (Kept("5-0", "9-0", trimmed=True), "9-1", True),
        (Kept("10-0", "90-0", trimmed=True), "9-0", True),
        (Kept(None, "9-0", trimmed=True), "9-0", False),
        (Kept(None, "9-0", trimmed=True), "8-0", True),
    ],
)
def test_what_is_lost(kept: Kept | None, position: str, lost: bool) -> None:
    assert is_lost(kept, position) is lost


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-2", True), ("7", True), ("", False), ("$", False), ("1-", False), ("-1", False)],
)
def test_what_an_id_is(text: str, expected: bool) -> None:
    assert is_id(text) is expected


def kinds(store: Any, experiment_id: uuid.UUID) -> list[str]:
    assert flush_events(20)
    return [each["kind"] for each in told(store, experiment_id)]


def test_the_services_tell_what_they_do_to_rollouts_groups_and_experiments(store: Any) -> None:
    group = factories.make_group(size=2)
    first, second = (factories.make_rollout(group=group) for _ in range(2))
    experiment = group.experiment
    for rollout, reward in ((first, 1.0), (second, 0.0)):
        end_rollout(rollout_id=rollout.pk, outcome="scored", reward=reward)
    assert kinds(store, experiment.pk) == ["rollout.done", "rollout.done", "group.ready"]
    done = told(store, experiment.pk)[0]
    del done["at"], done["experiment"]
    assert done == {
        "kind": "rollout.done",
        "rollout": str(first.pk),
        "group": str(group.pk),
        "sample": 0,
        "outcome": "scored",
        "reward": 1.0,
        "stop_reason": None,
        "failure_code": "",
    }

    store.delete(stream_key(experiment.pk))
    cancelled = factories.make_group(experiment=experiment, size=1)
    factories.make_rollout(group=cancelled)
    cancel_group(group_id=cancelled.pk)
    assert kinds(store, experiment.pk) == ["group.cancelled", "rollout.done"]

    store.delete(stream_key(experiment.pk))
    factories.make_rollout(group=factories.make_group(experiment=experiment, size=1))
    stop_experiment(experiment_id=experiment.pk)
    assert kinds(store, experiment.pk) == ["experiment.state", "group.cancelled", "rollout.done"]
    assert told(store, experiment.pk)[0]["state"] == "stopped"


def test_very_many_at_once_are_one_resync(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EACH_LIMIT", 2)
    group = factories.make_group(size=3)
    for _ in range(3):
        factories.make_rollout(group=group)
    stop_experiment(experiment_id=group.experiment_id)

    found = kinds(store, group.experiment_id)
    assert found == ["experiment.state", "group.cancelled", "resync"]


def expire(*, batch_id: uuid.UUID) -> None:
    past = timezone.now() - timedelta(seconds=1)
    Batch.objects.filter(pk=batch_id).update(lease_expires_at=past)
    assert expire_batches() == 1


def test_the_services_tell_what_becomes_of_batches(store: Any, settings: Any) -> None:
    experiment = factories.make_experiment()
    group = factories.make_group(experiment=experiment, state="ready", size=1, done_count=1)
    factories.make_scored_rollout(group=group)
    owner = experiment.owner
    for close in (return_batch, expire, acknowledge_batch):
        batch = lease_batch(experiment=experiment, owner=owner, groups=1)
        assert batch is not None
        close(batch_id=batch.pk)

    assert kinds(store, experiment.pk) == [
        *("batch.leased", "batch.returned"),
        *("batch.leased", "batch.expired"),
        *("batch.leased", "batch.acknowledged"),
    ]


def test_a_policys_new_version_is_told(store: Any) -> None:
    experiment = factories.make_experiment()
    update_policy(policy_id=experiment.policy_id, version=7)
    update_policy(policy_id=experiment.policy_id, model="other")

    assert kinds(store, experiment.pk) == ["policy.version"]
    assert told(store, experiment.pk)[0]["version"] == 7


def test_counts_are_told_when_they_change(store: Any) -> None:
    group = factories.make_group()
    factories.make_rollout(group=group)
    factories.make_scored_rollout(group=group)
    quiet = factories.make_experiment(state="paused")

    assert tell_counts() == 1
    assert tell_counts() == 0
    factories.make_rollout(group=group, state="run")
    assert tell_counts() == 1

    assert kinds(store, group.experiment_id) == ["counts", "counts"]
    last = told(store, group.experiment_id)[1]
    assert last["rollouts"] == {"queued": 1, "init": 0, "run": 1, "eval": 0}
    assert last["groups"] == {"open": 1, "ready": 0, "leased": 0}
    assert kinds(store, quiet.pk) == []
