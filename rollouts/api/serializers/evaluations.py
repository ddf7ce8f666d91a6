"""Evaluation runs: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.fields import OptionsField, PolicyField, TaskSetsField
from rollouts.models import EvaluationRun
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.options import Budgets, Sampling
from rollouts.services.evaluation_report import INTERVALS, Report, Slice
from sandboxes.api.strict import StrictSerializer

MAX_SEED = 2**62


class EvaluationInput(StrictSerializer):
    """A new evaluation run."""

    name = serializers.CharField(max_length=200)
    policy = PolicyField(help_text="Name or id; its present version is evaluated.")
    task_sets = TaskSetsField(allow_empty=False, max_length=1000, help_text="Names or ids.")
    samples_per_task = serializers.IntegerField(
        required=False, default=1, min_value=1, max_value=MAX_SAMPLES
    )
    seed = serializers.IntegerField(
        required=False,
        default=0,
        min_value=0,
        max_value=MAX_SEED,
        help_text="Each sample of a task has a seed of its own, the same in every run with this.",
    )
    key = serializers.CharField(
        required=False,
        default="reward",
        max_length=64,
        help_text="Which named reward says what is right; `reward`: the one of the trainer.",
    )
    threshold = serializers.FloatField(
        required=False, default=1.0, help_text="From where on a sample is right."
    )
    sampling = OptionsField(Sampling, required=False)
    budgets = OptionsField(Budgets, required=False)
    force = serializers.BooleanField(
        required=False,
        source="allow_broken",
        help_text="Run on environments that a verification found broken.",
    )


class EvaluationOutput(serializers.ModelSerializer[EvaluationRun]):
    """An evaluation run; its experiment holds the rollouts."""

    name = serializers.CharField(source="experiment.name", read_only=True)
    policy = serializers.CharField(source="experiment.policy.name", read_only=True)
    task_sets = serializers.SlugRelatedField[Any](
        source="experiment.task_sets", slug_field="name", many=True, read_only=True
    )
    seed = serializers.IntegerField(source="experiment.sampling.seed", read_only=True)

    class Meta:
        model = EvaluationRun
        fields = [
            "id",
            "name",
            "experiment",
            "policy",
            "policy_version",
            "task_sets",
            "samples_per_task",
            "seed",
            "key",
            "threshold",
            "created_at",
        ]
        read_only_fields = fields


class EstimateOutput(serializers.Serializer[Any]):
    """A mean over tasks with its 95 % interval; null where too few tasks have a value."""

    value = serializers.FloatField(allow_null=True)
    low = serializers.FloatField(allow_null=True)
    high = serializers.FloatField(allow_null=True)
    tasks = serializers.IntegerField()


class SliceOutput(serializers.Serializer[Slice]):
    """What came of some tasks."""

    tasks = serializers.IntegerField()
    samples = serializers.IntegerField()
    done = serializers.IntegerField()
    scored = serializers.IntegerField()
    nulls = serializers.IntegerField(help_text="Samples that are done and have no value.")
    right = serializers.IntegerField()
    pass_at = serializers.DictField(child=EstimateOutput(), help_text="By k.")
    mean_reward = EstimateOutput()


class EvaluationDetail(EvaluationOutput):
    """An evaluation run with what it found so far."""

    state = serializers.CharField(
        source="report.progress.state",
        read_only=True,
        help_text="`starting`, `running`, `done`, or that of an experiment that does not run.",
    )
    first_version = serializers.IntegerField(
        source="report.progress.first_version", read_only=True, allow_null=True
    )
    last_version = serializers.IntegerField(
        source="report.progress.last_version",
        read_only=True,
        allow_null=True,
        help_text="Of the tokens; not the first one: the policy was updated meanwhile.",
    )
    intervals = serializers.SerializerMethodField()
    overall = SliceOutput(source="report.overall", read_only=True)
    by_task_set = serializers.DictField(
        source="report.task_sets", child=SliceOutput(), read_only=True
    )

    class Meta(EvaluationOutput.Meta):
        fields = [
            *EvaluationOutput.Meta.fields,
            "state",
            "first_version",
            "last_version",
            "intervals",
            "overall",
            "by_task_set",
        ]
        read_only_fields = fields

    def get_intervals(self, run: EvaluationRun) -> str:
        """Return how the intervals are made."""
        return INTERVALS

    def to_representation(self, instance: EvaluationRun) -> dict[str, Any]:
        """Return the run with the report that the view made."""
        report: Report = self.context["report"]
        instance.report = report  # type: ignore[attr-defined]
        return super().to_representation(instance)


class ComparisonOutput(serializers.Serializer[Any]):
    """Two runs on the same tasks, paired by task."""

    run = serializers.UUIDField()
    other = serializers.UUIDField(help_text="The run of `with`.")
    complete = serializers.BooleanField(help_text="Whether both runs are done.")
    tasks = serializers.IntegerField(help_text="Of which both have a value.")
    left_out = serializers.IntegerField(help_text="Tasks of which only one has.")
    run_pass_at_1 = EstimateOutput()
    other_pass_at_1 = EstimateOutput()
    difference = EstimateOutput(help_text="The run's pass@1 minus the other's.")
    wins = serializers.IntegerField(help_text="Tasks that the run solved more often.")
    losses = serializers.IntegerField()
    ties = serializers.IntegerField()
    p_value = serializers.FloatField(
        help_text="Exact two-sided sign test on wins and losses; McNemar's for one sample a task."
    )
    intervals = serializers.CharField()
