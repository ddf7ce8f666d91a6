"""Evaluations of rollouts, and re-evaluations of experiments: input and output."""

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.api.serializers.rollouts import NumbersField
from rollouts.models import Evaluation, Reevaluation
from sandboxes.api.strict import JsonObjectField, StrictSerializer


@extend_schema_field({"type": "array", "items": {"type": "number", "nullable": True}})
class TurnRewardsField(serializers.JSONField):
    """A number or null for each turn."""


class EvidenceOutput(serializers.Serializer[Evaluation]):
    """What was kept of what the evaluator was given."""

    size_bytes = serializers.IntegerField(source="evidence_size_bytes")
    sha256 = serializers.CharField(source="evidence_sha256")


class RolloutEvaluationOutput(serializers.ModelSerializer[Evaluation]):
    """One scoring of a rollout."""

    rewards = NumbersField(read_only=True)
    turn_rewards = TurnRewardsField(read_only=True)
    details = JsonObjectField(read_only=True)
    code = serializers.SerializerMethodField()
    evidence = serializers.SerializerMethodField()

    class Meta:
        model = Evaluation
        fields = [
            "id",
            "source",
            "reevaluation",
            "evaluator",
            "evaluator_version",
            "settings_digest",
            "reward",
            "rewards",
            "turn_rewards",
            "code",
            "details",
            "log",
            "evidence",
            "created_at",
        ]
        read_only_fields = fields

    @extend_schema_field({"type": "string", "nullable": True})
    def get_code(self, evaluation: Evaluation) -> str | None:
        """Return the dotted code of why there is no reward, null where there is one."""
        return evaluation.code or None

    @extend_schema_field(EvidenceOutput(allow_null=True))
    def get_evidence(self, evaluation: Evaluation) -> dict[str, Any] | None:
        """Return what was kept, to be had from `evidence/`; null: nothing."""
        return dict(EvidenceOutput(evaluation).data) if evaluation.evidence_path else None


class ReevaluationInput(StrictSerializer):
    """By what an experiment is scored again: an evaluator, or that of an environment."""

    evaluator = serializers.CharField(max_length=99, required=False)
    evaluator_settings = JsonObjectField(required=False)
    environment = serializers.CharField(
        max_length=120, required=False, help_text="Such as terminal@3, or terminal: its newest."
    )


class ChangedOutput(serializers.Serializer[Any]):
    """A rollout whose reward differs."""

    rollout = serializers.UUIDField()
    task_ref = serializers.CharField()
    before = serializers.FloatField()
    after = serializers.FloatField()


class ReevaluationReportOutput(serializers.Serializer[Any]):
    """What was found so far; means are over the rollouts that were scored again."""

    total = serializers.IntegerField(help_text="Rollouts with a reward of their own.")
    done = serializers.IntegerField()
    scored = serializers.IntegerField()
    faults = serializers.DictField(
        child=serializers.IntegerField(), help_text="How many got no reward, by code."
    )
    mean_before = serializers.FloatField(allow_null=True)
    mean_after = serializers.FloatField(allow_null=True)
    agreement = serializers.FloatField(
        allow_null=True, help_text="The share with the same reward as before."
    )
    changed_count = serializers.IntegerField()
    changed = ChangedOutput(many=True, help_text="At most 100, those that differ most first.")


class ReevaluationOutput(serializers.ModelSerializer[Reevaluation]):
    """A re-evaluation."""

    environment = serializers.SerializerMethodField()
    evaluator_settings = JsonObjectField(read_only=True, allow_null=True)

    class Meta:
        model = Reevaluation
        fields = [
            "id",
            "experiment",
            "evaluator",
            "evaluator_settings",
            "environment",
            "state",
            "cancel_requested_at",
            "created_at",
            "ended_at",
        ]
        read_only_fields = fields

    @extend_schema_field({"type": "string", "nullable": True})
    def get_environment(self, job: Reevaluation) -> str | None:
        """Return `name@version` of the environment whose evaluator it is."""
        return None if job.environment is None else job.environment.ref


class ReevaluationDetail(ReevaluationOutput):
    """A re-evaluation with what it found so far."""

    report = serializers.SerializerMethodField()

    class Meta(ReevaluationOutput.Meta):
        fields = [*ReevaluationOutput.Meta.fields, "report"]
        read_only_fields = fields

    @extend_schema_field(ReevaluationReportOutput)
    def get_report(self, job: Reevaluation) -> dict[str, Any]:
        """Return the report that the view made."""
        return dict(ReevaluationReportOutput(self.context["report"]).data)
