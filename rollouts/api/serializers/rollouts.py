"""Rollouts and attempts: output."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from rollouts.models import Attempt, Rollout


@extend_schema_field({"type": "object", "additionalProperties": {"type": "number"}})
class NumbersField(serializers.JSONField):
    """Numbers by name."""


class RolloutOutput(serializers.ModelSerializer[Rollout]):
    """A rollout: where it stands, why, how long it took and where it ran."""

    task = serializers.UUIDField(source="group.task_id", read_only=True)
    task_ref = serializers.CharField(source="group.task.ref", read_only=True)
    environment = serializers.CharField(source="environment.ref", read_only=True)
    failure_code = serializers.SerializerMethodField()
    failure_detail = serializers.SerializerMethodField()
    rewards = NumbersField(read_only=True)
    timings = NumbersField(read_only=True, help_text="Seconds per stage, queue and activity.")
    node = serializers.SlugRelatedField[Any](slug_field="name", read_only=True)

    class Meta:
        model = Rollout
        fields = [
            "id",
            "experiment",
            "group",
            "task",
            "task_ref",
            "sample",
            "environment",
            "state",
            "outcome",
            "stop_reason",
            "failure_code",
            "failure_detail",
            "reward",
            "rewards",
            "timings",
            "node",
            "turns",
            "sampled_tokens",
            "tool_calls",
            "restarts",
            "replaced",
            "cancel_requested_at",
            "created_at",
            "done_at",
        ]
        read_only_fields = fields

    @extend_schema_field({"type": "string", "nullable": True})
    def get_failure_code(self, rollout: Rollout) -> str | None:
        """Return the dotted code of what failed, null when nothing did."""
        return rollout.failure_code or None

    @extend_schema_field({"type": "string", "nullable": True})
    def get_failure_detail(self, rollout: Rollout) -> str | None:
        """Return what failed in words, null when nothing did."""
        return rollout.failure_detail or None


class RolloutDetail(RolloutOutput):
    """A rollout with what the agent answered."""

    class Meta(RolloutOutput.Meta):
        fields = [*RolloutOutput.Meta.fields, "answer", "last_message"]
        read_only_fields = fields


class AttemptOutput(serializers.ModelSerializer[Attempt]):
    """One try at one stage."""

    node = serializers.SlugRelatedField[Any](slug_field="name", read_only=True)
    pid = serializers.IntegerField(source="worker.pid", read_only=True, default=None)

    class Meta:
        model = Attempt
        fields = [
            "id",
            "stage",
            "number",
            "state",
            "node",
            "pid",
            "budget_seconds",
            "failure_code",
            "failure_detail",
            "publish_count",
            "created_at",
            "published_at",
            "started_at",
            "ended_at",
        ]
        read_only_fields = fields


class TurnSchema(serializers.Serializer[Any]):
    """One sampled turn of a segment."""

    start = serializers.IntegerField(help_text="Place in response_ids.")
    end = serializers.IntegerField()
    finish_reason = serializers.CharField()
    reward = serializers.FloatField(allow_null=True)


@extend_schema_field(
    {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    }
)
class VersionRunsField(serializers.JSONField):
    """Pairs of policy version and run length."""


@extend_schema_field(OpenApiTypes.OBJECT)
class FreeObjectField(serializers.JSONField):
    """An object of any shape."""


class SegmentSchema(serializers.Serializer[Any]):
    """One run of tokens in which every prompt extends the one before."""

    id = serializers.IntegerField()
    parent = serializers.IntegerField(allow_null=True)  # type: ignore[assignment]
    fork_reason = serializers.CharField(allow_null=True)
    sampling = FreeObjectField()
    logprob_mode = serializers.CharField()
    turns = TurnSchema(many=True)
    prompt_ids = serializers.ListField(child=serializers.IntegerField())
    response_ids = serializers.ListField(child=serializers.IntegerField())
    response_mask = serializers.ListField(
        child=serializers.IntegerField(min_value=0, max_value=1),
        help_text="1 = sampled by the policy.",
    )
    response_logprobs = serializers.ListField(
        child=serializers.FloatField(), help_text="0.0 where the mask is 0."
    )
    policy_versions = VersionRunsField()


class VersionSpanSchema(serializers.Serializer[Any]):
    """Oldest and newest policy version of a trajectory's tokens."""

    first = serializers.IntegerField(allow_null=True)
    last = serializers.IntegerField(allow_null=True)


class TrajectorySchema(serializers.Serializer[Any]):
    """A trajectory, for the schema only: it is sent as it was stored, joined with its score."""

    rollout = serializers.UUIDField()
    group = serializers.UUIDField()
    task = serializers.UUIDField()
    task_ref = serializers.CharField()
    sample = serializers.IntegerField()
    environment = serializers.CharField()
    outcome = serializers.CharField(allow_null=True)
    stop_reason = serializers.CharField(allow_null=True)
    failure_code = serializers.CharField(allow_null=True)
    reward = serializers.FloatField(allow_null=True)
    rewards = NumbersField()
    trainable = serializers.BooleanField()
    policy_version = VersionSpanSchema()
    unknown_version_tokens = serializers.IntegerField(
        required=False, help_text="Sampled tokens of a policy version that nobody knows."
    )
    turns = serializers.IntegerField()
    timings = NumbersField()
    segments = SegmentSchema(many=True)
    messages = serializers.ListField(child=FreeObjectField())
    tools = serializers.ListField(child=FreeObjectField())
    metadata = FreeObjectField()
