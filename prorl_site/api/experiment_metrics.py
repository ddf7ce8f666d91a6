"""Active experiments' numbers for Prometheus."""

import logging
from collections.abc import Iterator

from django.db import OperationalError
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollouts.inference.router import Router
from rollouts.models import Experiment
from rollouts.services.experiment_metrics import ExperimentMetrics, measure_experiment
from rollouts.states import ExperimentState, Purpose

logger = logging.getLogger(__name__)

# A label's values live for ever in Prometheus: only active experiments, and not all of very many.
EXPERIMENTS = 20

_FAMILIES = {
    "prorl_rollouts": ("Rollouts of an experiment that are not done.", ["state"]),
    "prorl_rollouts_done": ("Finished rollouts of an experiment.", ["outcome"]),
    "prorl_groups": ("Groups of an experiment.", ["state"]),
    "prorl_groups_filtered": ("Groups that a rule kept from the trainer.", ["rule"]),
    "prorl_sampled_tokens": ("Tokens that an experiment sampled.", []),
    "prorl_reward_mean": ("Mean reward of the newest policy version with samples.", []),
    "prorl_reward_std": ("Standard deviation of those rewards.", []),
    "prorl_policy_version": ("The version of an experiment's policy.", []),
    "prorl_stage_seconds": ("Seconds in a stage, of the newest groups.", ["stage", "quantile"]),
    "prorl_rollouts_per_minute": ("Rollouts done for each of the last ten minutes.", []),
    "prorl_filter_rate": ("Filtered groups of those that were decided.", []),
    "prorl_policy_lag_mean": ("Mean policy lag of the last batches' groups.", []),
    "prorl_policy_lag_max": ("Largest policy lag of the last batches' groups.", []),
    "prorl_inference_utilisation": ("Taken slots of the policy's servers.", []),
}


class ExperimentCollector(Collector):
    """The newest active experiments, each by its id."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield the families; none without an active experiment."""
        active = (
            Experiment.objects.filter(state=ExperimentState.ACTIVE)
            .exclude(purpose=Purpose.VERIFICATION)
            .select_related("policy")
        )
        families = {
            name: GaugeMetricFamily(name, text, labels=["experiment", *labels])
            for name, (text, labels) in _FAMILIES.items()
        }
        for experiment in active.order_by("-created_at", "pk")[:EXPERIMENTS]:
            try:
                measured = measure_experiment(experiment=experiment, router=self._router)
            except OperationalError as fault:
                logger.warning("experiment %s cannot be measured: %s", experiment.pk, fault)
                continue
            for name, labels, value in _samples(measured):
                if value is not None:
                    families[name].add_metric([str(experiment.pk), *labels], value)
        yield from (family for family in families.values() if family.samples)


def _samples(measured: ExperimentMetrics) -> Iterator[tuple[str, list[str], float | None]]:
    """Yield each number: its family, its labels beside the experiment, its value."""
    for state, count in measured.rollouts["by_state"].items():
        if state != "done":
            yield "prorl_rollouts", [state], count
    for outcome, count in measured.rollouts["by_outcome"].items():
        yield "prorl_rollouts_done", [outcome], count
    for state, count in measured.groups["by_state"].items():
        yield "prorl_groups", [state], count
    for rule, count in measured.groups["filtered_by_rule"].items():
        yield "prorl_groups_filtered", [rule], count
    yield "prorl_sampled_tokens", [], measured.tokens["sampled"]
    if measured.rewards:
        yield "prorl_reward_mean", [], measured.rewards[0].mean
        yield "prorl_reward_std", [], measured.rewards[0].std
    yield "prorl_policy_version", [], measured.policy_version
    for stage in measured.stages:
        yield "prorl_stage_seconds", [stage.name, "0.5"], stage.p50
        yield "prorl_stage_seconds", [stage.name, "0.95"], stage.p95
    yield "prorl_rollouts_per_minute", [], measured.throughput.rollouts_per_minute
    yield "prorl_filter_rate", [], measured.groups["filter_rate"]
    yield "prorl_policy_lag_mean", [], measured.policy_lag.mean
    yield "prorl_policy_lag_max", [], measured.policy_lag.max
    if measured.inference is not None:
        yield "prorl_inference_utilisation", [], measured.inference.utilisation
