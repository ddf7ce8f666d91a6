"""Batches over the service's own API, in every format, by a trainer who dies and comes back."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from prorl_client import Client, Experiment, InvalidRequest, LeaseExpired, WaitTimedOut

from rollouts.models import Batch, Group
from tests import factories
from tests.api.callers import Caller
from tests.clients.conftest import PLAIN, QUICK
from tests.clients.shapes import same_tokens


def make_ready(experiment: Experiment, **values: Any) -> Group:
    """Return a finished group of the experiment."""
    from rollouts.models import Experiment as Row

    return factories.make_ready_group(experiment=Row.objects.get(pk=experiment.id), **values)


def test_batch_is_leased_read_and_acknowledged(client: Client, experiment: Experiment) -> None:
    groups = [make_ready(experiment, rewards=[1.0, 0.25]) for _ in range(2)]

    with experiment.lease(groups=2) as batch:
        assert batch.state == "leased"
        assert [[each.group for each in group] for group in batch.groups] == [
            [str(group.pk)] * 2 for group in groups
        ]
        assert [each.reward for each in batch] == [1.0, 0.25] * 2
        assert all(each.trainable for each in batch)

    row = Batch.objects.get()
    assert (str(row.pk), row.state) == (batch.id, "acknowledged")
    assert set(Group.objects.values_list("state", flat=True)) == {"consumed"}
    listed = list(experiment.leases())
    assert [(each.id, each.state, each.number) for each in listed] == [
        (batch.id, "acknowledged", 1)
    ]


@pytest.mark.parametrize("use_arrow", [True, False], ids=["arrow", "lines"])
def test_formats_say_the_same(
    address: str, trainer: Caller, experiment: Experiment, use_arrow: bool
) -> None:
    if use_arrow:
        pytest.importorskip("pyarrow")
    make_ready(experiment, rewards=[1.0, 0.0, 0.5])
    with Client(
        address, trainer.text, retries=QUICK, use_arrow=use_arrow, http_options=PLAIN
    ) as client:
        batch = client.experiment(experiment.id).lease(groups=1)

        plain = client.get(f"/batches/{batch.id}/")
        again = client.batch(batch.id)

    assert len(plain["trajectories"]) == 3
    for found in (batch, again):
        assert (found.id, found.policy_version, found.number) == (plain["id"], 3, 1)
        for trajectory, whole in zip(found, plain["trajectories"], strict=True):
            described = trajectory.as_dict()
            for name in ("rollout", "group", "task_ref", "sample", "reward", "outcome", "rewards"):
                assert described[name] == whole[name], name
            assert described["policy_version"] == whole["policy_version"]
            assert described["segments"] == whole["segments"]
            same_tokens(trajectory.segments[0], whole["segments"][0])
    assert (batch.trajectories[0].messages is None) is use_arrow


def test_given_back_batch_comes_again_as_it_was(experiment: Experiment) -> None:
    for _ in range(3):
        make_ready(experiment)
    first = experiment.lease(groups=2)
    ids = [each.rollout for each in first]

    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError

    again = experiment.lease(groups=2)
    assert [each.rollout for each in again] == ids
    assert again.repeats == first.id
    again.ack()
    again.ack()
    with pytest.raises(LeaseExpired):
        first.ack()


def test_trainer_that_was_away_too_long(experiment: Experiment) -> None:
    make_ready(experiment)
    batch = experiment.lease(groups=1)
    Batch.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=1))

    for act in (batch.ack, batch.nack, lambda: batch.extend(60)):
        with pytest.raises(LeaseExpired, match="Drop what you computed"):
            act()


def test_lease_is_lengthened_by_itself(experiment: Experiment, settings: Any) -> None:
    settings.BATCH_LEASE_SECONDS = 3.0
    make_ready(experiment)

    batch = experiment.lease(groups=1)
    first = Batch.objects.get().lease_expires_at

    from tests.api.live import eventually

    eventually(lambda: Batch.objects.get().lease_expires_at > first, "the lease is lengthened")
    batch.ack()
    assert Batch.objects.get().state == "acknowledged"


def test_batch_that_becomes_ready_while_waiting(experiment: Experiment) -> None:
    maker = threading.Timer(0.2, make_ready_elsewhere, [experiment])
    maker.start()

    batch = experiment.lease(groups=1, timeout=60)

    maker.join()
    assert len(batch) == 2


def make_ready_elsewhere(experiment: Experiment) -> None:
    """Make a group ready in another thread, which leaves no connection behind."""
    from django.db import connection

    try:
        make_ready(experiment)
    finally:
        connection.close()


def test_wait_ends_with_nothing(experiment: Experiment) -> None:
    with pytest.raises(WaitTimedOut):
        experiment.lease(groups=1, timeout=0)

    assert Batch.objects.count() == 0


def test_iteration_over_a_stopped_experiment_ends(experiment: Experiment) -> None:
    for _ in range(3):
        make_ready(experiment)
    experiment.stop()

    sizes = []
    for batch in experiment.batches(groups=1, limit=3, timeout=30):
        batch.ack()
        sizes.append(len(batch))

    assert sizes == [2, 2, 2]


def test_far_too_many_groups(experiment: Experiment) -> None:
    with pytest.raises(InvalidRequest, match="groups: One batch holds at most"):
        experiment.lease(groups=1_000_000)


def test_exports_of_the_real_thing(experiment: Experiment, tmp_path: Any) -> None:
    from prorl_client import read_jsonl

    make_ready(experiment)

    assert experiment.export(tmp_path / "all.jsonl") == 2
    assert experiment.export(tmp_path / "atif") == 2
    batch = experiment.lease(groups=1)
    assert batch.export(tmp_path / "batch.jsonl") == 2

    whole = sorted(each.rollout for each in read_jsonl(tmp_path / "all.jsonl"))
    assert whole == sorted(each.rollout for each in batch)
    atif = pytest.importorskip("atif")
    for path in (tmp_path / "atif").iterdir():
        atif.Trajectory.model_validate_json(path.read_text())
