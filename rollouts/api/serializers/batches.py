"""Batches: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.serializers.rollouts import TrajectorySchema
from rollouts.models import Batch
from rollouts.services.batches import MAX_GROUPS
from sandboxes.api.strict import StrictSerializer

MAX_LEASE_SECONDS = 86_400.0
MAX_LAG = 2**31 - 1


class BatchInput(StrictSerializer):
    """How many groups to lease, and how long to wait for them."""

    groups = serializers.IntegerField(
        min_value=1,
        max_value=MAX_GROUPS,
        error_messages={
            "max_value": "One batch holds at most {max_value} groups; lease several batches."
        },
    )
    wait_seconds = serializers.FloatField(
        required=False,
        default=0.0,
        min_value=0,
        help_text="Longest wait for the groups to be finished; the service caps it.",
    )
    max_policy_lag = serializers.IntegerField(
        required=False,
        allow_null=True,
        min_value=0,
        max_value=MAX_LAG,
        help_text="Groups whose oldest token is more versions old are filtered as `too_stale`; "
        "the experiment's own limit holds too.",
    )
    min_complete_fraction = serializers.FloatField(
        required=False,
        allow_null=True,
        min_value=0,
        max_value=1,
        help_text="Groups of which a smaller part was scored are passed over and stay ready.",
    )


class ExtendInput(StrictSerializer):
    """A longer lease."""

    seconds = serializers.FloatField(
        min_value=1, max_value=MAX_LEASE_SECONDS, help_text="From now to the lease's end."
    )


class BatchOutput(serializers.ModelSerializer[Batch]):
    """A batch without its trajectories."""

    class Meta:
        model = Batch
        fields = [
            "id",
            "experiment",
            "number",
            "repeats",
            "state",
            "group_count",
            "policy_version",
            "max_lag",
            "lease_expires_at",
            "created_at",
            "closed_at",
        ]
        read_only_fields = fields


class BatchContent(BatchOutput):
    """A batch with its trajectories, in start order of the groups and by sample."""

    trajectories = TrajectorySchema(many=True)

    class Meta(BatchOutput.Meta):
        fields: list[Any] = [*BatchOutput.Meta.fields, "trajectories"]
        read_only_fields = fields
