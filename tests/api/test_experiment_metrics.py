"""An experiment's numbers over HTTP, and those of active ones for Prometheus."""

from collections.abc import Callable, Iterator

import pytest
import redis

from prorl_site.api import experiment_metrics
from rollouts.inference.router import Router
from rollouts.models import Experiment
from rollouts.stages import process
from tests import factories
from tests.api.callers import Caller, assert_problem


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a routing store that does not answer."""
    with redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1) as client:
        router = Router(client, "gone")
        monkeypatch.setattr(process, "router", lambda: router)
        yield


@pytest.fixture
def experiment(trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


def test_the_numbers_of_an_experiment(trainer: Caller, experiment: Experiment) -> None:
    factories.make_ready_group(experiment=experiment, rewards=[1.0, 0.0])

    body = trainer.call("GET", f"experiments/{experiment.pk}/metrics/").json()

    assert list(body) == [
        *("experiment", "at", "policy_version", "rollouts", "groups", "tokens", "window"),
        *("rewards", "stages", "throughput", "policy_lag", "inference"),
    ]
    assert body["experiment"] == str(experiment.pk)
    assert body["rollouts"]["by_outcome"]["scored"] == 2
    assert body["groups"]["by_state"]["ready"] == 1
    assert body["rewards"] == [{"policy_version": 3, "count": 2, "mean": 0.5, "std": 0.5}]
    assert body["stages"] == [{"name": "run", "count": 2, "p50": 0.5, "p95": 0.5}]
    assert body["throughput"]["rollouts"] == 2
    assert body["policy_lag"] == {"batches": 0, "groups": 0, "mean": None, "max": None}
    assert body["inference"] is None


def test_as_many_queries_for_many_groups(
    trainer: Caller, experiment: Experiment, django_assert_num_queries: Callable[..., object]
) -> None:
    path = f"experiments/{experiment.pk}/metrics/"
    trainer.call("GET", path)
    for _ in range(3):
        factories.make_ready_group(experiment=experiment)
    with django_assert_num_queries(15):  # type: ignore[attr-defined]
        trainer.call("GET", path)


def test_who_may_ask(
    trainer: Caller,
    stranger: Caller,
    anybody: Caller,
    make_caller: Callable[..., Caller],
    experiment: Experiment,
) -> None:
    path = f"experiments/{experiment.pk}/metrics/"
    assert_problem(anybody.call("GET", path), 401, "auth.missing")
    assert_problem(stranger.call("GET", path), 404, "not_found")
    blind = make_caller(trainer.user, scopes=["submit"])
    assert_problem(blind.call("GET", path), 403, "auth.forbidden")
    assert_problem(trainer.call("POST", path, {}), 405, "request.method")


def test_active_experiments_for_prometheus(
    trainer: Caller, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_metrics, "EXPERIMENTS", 1)
    older = experiment
    newest = factories.make_experiment(owner=trainer.user)
    factories.make_experiment(owner=trainer.user, state="stopped")
    factories.make_ready_group(experiment=newest, rewards=[1.0, 0.0])
    filtered = factories.make_group(
        experiment=newest, state="filtered", filter_rule="all_wrong", size=1, done_count=0
    )
    factories.make_rollout(group=filtered)

    lines = trainer.call("GET", "/metrics").content.decode().splitlines()

    name = f'experiment="{newest.pk}"'
    assert str(older.pk) not in "\n".join(lines)
    assert [line.replace(name, "E") for line in lines if name in line] == [
        'prorl_rollouts{E,state="queued"} 1.0',
        'prorl_rollouts{E,state="init"} 0.0',
        'prorl_rollouts{E,state="run"} 0.0',
        'prorl_rollouts{E,state="eval"} 0.0',
        'prorl_rollouts_done{E,outcome="scored"} 2.0',
        'prorl_rollouts_done{E,outcome="infra_failed"} 0.0',
        'prorl_rollouts_done{E,outcome="timed_out"} 0.0',
        'prorl_rollouts_done{E,outcome="cancelled"} 0.0',
        'prorl_groups{E,state="open"} 0.0',
        'prorl_groups{E,state="ready"} 1.0',
        'prorl_groups{E,state="leased"} 0.0',
        'prorl_groups{E,state="consumed"} 0.0',
        'prorl_groups{E,state="filtered"} 1.0',
        'prorl_groups{E,state="cancelled"} 0.0',
        'prorl_groups_filtered{E,rule="all_wrong"} 1.0',
        "prorl_sampled_tokens{E} 4.0",
        "prorl_reward_mean{E} 0.5",
        "prorl_reward_std{E} 0.5",
        "prorl_policy_version{E} 3.0",
        'prorl_stage_seconds{E,quantile="0.5",stage="run"} 0.5',
        'prorl_stage_seconds{E,quantile="0.95",stage="run"} 0.5',
        next(line.replace(name, "E") for line in lines if "rollouts_per_minute{" in line),
        "prorl_filter_rate{E} 0.5",
    ]
