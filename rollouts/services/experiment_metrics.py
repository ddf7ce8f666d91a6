"""An experiment in numbers: totals, and how its newest groups fare.

Totals are counted over all of its rows. Everything else looks at the newest groups alone, so that
it costs as much after a million groups as after a thousand; a time limit holds for all of it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import QuerySet
from django.utils import timezone

from rollouts.inference.exceptions import RouterUnavailable
from rollouts.inference.router import Router
from rollouts.models import Experiment, Group, InferenceServer
from rollouts.services.group_counts import count_groups
from rollouts.states import GroupState, Outcome, RolloutState

logger = logging.getLogger(__name__)

WINDOW_GROUPS = 1_000
WINDOW_BATCHES = 20
VERSIONS = 50
MINUTES = 10.0
TIME_LIMIT_MS = 10_000
# What reached a decision: of it, the filtered are the filter's share.
DECIDED = (GroupState.READY, GroupState.LEASED, GroupState.CONSUMED, GroupState.FILTERED)


@dataclass(frozen=True, slots=True)
class VersionReward:
    """Rewards of scored samples that a policy version began; `std` is that of the population."""

    policy_version: int | None
    count: int
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds that finished rollouts spent in a stage, a queue or an activity."""

    name: str
    count: int
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was done in the last minutes, for each minute and second."""

    minutes: float
    rollouts: int
    rollouts_per_minute: float
    sampled_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class PolicyLag:
    """Versions between a group's oldest sampled token and its lease; None without batches."""

    batches: int
    groups: int
    mean: float | None
    max: int | None


@dataclass(frozen=True, slots=True)
class Inference:
    """What the policy's servers have in flight, of all experiments that share them."""

    servers: int
    slots: int
    requests: int
    tokens: int
    utilisation: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentMetrics:
    """An experiment in numbers."""

    experiment: UUID
    at: datetime
    policy_version: int
    rollouts: dict[str, Any]
    groups: dict[str, Any]
    tokens: dict[str, int]
    window: dict[str, Any]
    rewards: list[VersionReward]
    stages: list[StageTime]
    throughput: Throughput
    policy_lag: PolicyLag
    inference: Inference | None


def measure_experiment(*, experiment: Experiment, router: Router) -> ExperimentMetrics:
    """Measure an experiment; `inference` is None when the routing store does not answer.

    Raises OperationalError when the database takes too long.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = %s", [TIME_LIMIT_MS])
        rollouts, sampled = _rollout_totals(experiment.pk)
        groups = _group_totals(experiment)
        recent = _recent_groups(experiment.pk)
        window, throughput = _throughput(experiment, recent)
        rewards, stages = _rewards(recent), _stages(recent)
        lag = _policy_lag(experiment.pk)
        assert experiment.policy_id is not None  # only verifications have none
        servers = dict(
            InferenceServer.objects.routable()
            .filter(policy_id=experiment.policy_id)
            .values_list("pk", "max_in_flight")
        )
    return ExperimentMetrics(
        experiment=experiment.pk,
        at=timezone.now(),
        policy_version=experiment.policy.version,
        rollouts=rollouts,
        groups=groups,
        tokens={"sampled": sampled, **window.pop("tokens")},
        window=window,
        rewards=rewards,
        stages=stages,
        throughput=throughput,
        policy_lag=lag,
        inference=_inference(servers, router),
    )


def _rows(sql: str, **values: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def _rollout_totals(experiment_id: UUID) -> tuple[dict[str, Any], int]:
    """Return rollouts by state and outcome, and the tokens that they sampled."""
    rows = _rows(
        "SELECT state, outcome, count(*), coalesce(sum(sampled_tokens), 0),"
        " count(*) FILTER (WHERE replaced)"
        " FROM rollouts_rollout WHERE experiment_id = %(experiment)s GROUP BY state, outcome",
        experiment=experiment_id,
    )
    states = dict.fromkeys(RolloutState.values, 0)
    outcomes = dict.fromkeys(Outcome.values, 0)
    for state, outcome, count, _tokens, _replaced in rows:
        states[state] += count
        if outcome is not None:
            outcomes[outcome] += count
    totals = {
        "total": sum(states.values()),
        "by_state": states,
        "by_outcome": outcomes,
        "replaced": sum(row[4] for row in rows),
    }
    return totals, int(sum(row[3] for row in rows))


def _group_totals(experiment: Experiment) -> dict[str, Any]:
    counts = count_groups(experiment=experiment)
    states = counts["states"]
    decided = sum(states[state] for state in DECIDED)
    return {
        "total": sum(states.values()),
        "by_state": states,
        "filtered_by_rule": counts["rules"],
        "filter_rate": states[GroupState.FILTERED] / decided if decided else None,
    }


def _recent_groups(experiment_id: UUID) -> list[UUID]:
    """Return the ids of the newest groups, in any order: some of each state by its index."""

    def newest(state: str) -> QuerySet[Group, Any]:
        rows = Group.objects.filter(experiment_id=experiment_id, state=state)
        return rows.order_by("-sequence").values_list("pk", "sequence")[:WINDOW_GROUPS]

    first, *others = (newest(state) for state in GroupState.values)
    every = reduce(lambda some, more: some.union(more, all=True), others, first)
    return [pk for pk, _ in every.order_by("-sequence")[:WINDOW_GROUPS]]


def _throughput(
    experiment: Experiment, recent: Sequence[UUID]
) -> tuple[dict[str, Any], Throughput]:
    """Return what the newest groups are of, and what of them was done in the last minutes."""
    ((done, scored, prompts, responses, last, last_tokens, first_at, now),) = _rows(
        "SELECT count(*), count(*) FILTER (WHERE r.outcome = 'scored'),"
        " coalesce(sum(t.prompt_tokens), 0), coalesce(sum(t.response_tokens), 0),"
        " count(*) FILTER (WHERE fresh), coalesce(sum(r.sampled_tokens) FILTER (WHERE fresh), 0),"
        " min(r.done_at), now()"
        " FROM rollouts_rollout r LEFT JOIN rollouts_trajectory t ON t.rollout_id = r.id,"
        " LATERAL (SELECT r.done_at > now() - make_interval(secs => %(seconds)s) AS fresh) f"
        " WHERE r.group_id = ANY(%(groups)s) AND r.state = 'done'",
        seconds=MINUTES * 60,
        groups=list(recent),
    )
    since = experiment.created_at
    if len(recent) >= WINDOW_GROUPS and first_at is not None:
        since = max(since, first_at)  # what is older may have been done in groups not looked at
    minutes = min(MINUTES, max((now - since).total_seconds(), 1.0) / 60)
    window = {
        "groups": len(recent),
        "rollouts": done,
        "scored": scored,
        "tokens": {"window_prompt": int(prompts), "window_response": int(responses)},
    }
    return window, Throughput(
        minutes=round(minutes, 3),
        rollouts=last,
        rollouts_per_minute=round(last / minutes, 4),
        sampled_tokens_per_second=round(int(last_tokens) / minutes / 60, 4),
    )


def _rewards(recent: Sequence[UUID]) -> list[VersionReward]:
    """Return the rewards by the version that a trajectory begins with, the newest first."""
    rows = _rows(
        "SELECT t.first_policy_version, count(*), avg(r.reward), stddev_pop(r.reward)"
        " FROM rollouts_rollout r LEFT JOIN rollouts_trajectory t ON t.rollout_id = r.id"
        " WHERE r.group_id = ANY(%(groups)s) AND r.outcome = 'scored'"
        " GROUP BY 1 ORDER BY 1 DESC NULLS LAST LIMIT %(versions)s",
        groups=list(recent),
        versions=VERSIONS,
    )
    return [VersionReward(version, count, mean, std) for version, count, mean, std in rows]


def _stages(recent: Sequence[UUID]) -> list[StageTime]:
    rows = _rows(
        "SELECT s.key, count(*), percentile_cont(0.5) WITHIN GROUP (ORDER BY s.value::float),"
        " percentile_cont(0.95) WITHIN GROUP (ORDER BY s.value::float)"
        " FROM rollouts_rollout r, jsonb_each(r.timings) s"
        " WHERE r.group_id = ANY(%(groups)s) AND r.state = 'done'"
        " AND jsonb_typeof(s.value) = 'number' GROUP BY s.key ORDER BY s.key",
        groups=list(recent),
    )
    return [StageTime(name, count, round(p50, 4), round(p95, 4)) for name, count, p50, p95 in rows]


def _policy_lag(experiment_id: UUID) -> PolicyLag:
    ((batches, groups, mean, most),) = _rows(
        "SELECT count(DISTINCT b.id), count(g.id),"
        " avg(greatest(b.policy_version - g.oldest_version, 0))::float,"
        " max(greatest(b.policy_version - g.oldest_version, 0))"
        " FROM (SELECT id, policy_version FROM rollouts_batch"
        "  WHERE experiment_id = %(experiment)s ORDER BY number DESC LIMIT %(batches)s) b"
        " JOIN rollouts_group g ON g.batch_id = b.id WHERE g.oldest_version IS NOT NULL",
        experiment=experiment_id,
        batches=WINDOW_BATCHES,
    )
    return PolicyLag(batches=batches, groups=groups, mean=mean, max=most)


def _inference(servers: dict[UUID, int], router: Router) -> Inference | None:
    try:
        loads = router.load()
    except RouterUnavailable:
        return None
    of_policy = [loads[str(pk)] for pk in servers if str(pk) in loads]
    slots = sum(servers.values())
    requests = sum(load.requests for load in of_policy)
    return Inference(
        servers=len(servers),
        slots=slots,
        requests=requests,
        tokens=sum(load.tokens for load in of_policy),
        utilisation=requests / slots if slots else None,
    )
