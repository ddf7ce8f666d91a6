"""Environments' files and verifications: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.fields import OptionsField, named
from rollouts.models import TaskSet, Verification
from rollouts.models.verification import MAX_REPEATS, MAX_TASKS
from rollouts.options import Budgets
from rollouts.services.environment_files import MAX_TOML_BYTES
from rollouts.services.verifications import DEADLINES, done_of
from sandboxes.api.strict import JsonObjectField, StrictSerializer

MAX_SEED = 2**62


class EnvironmentFile(StrictSerializer):
    """One environment as TOML."""

    toml = serializers.CharField(
        max_length=MAX_TOML_BYTES, trim_whitespace=False, help_text="As the export writes it."
    )


class DifferenceLine(serializers.Serializer[Any]):
    """One line of a unified difference."""

    kind = serializers.ChoiceField(choices=["same", "removed", "added", "place"])
    text = serializers.CharField()


class DifferenceOutput(serializers.Serializer[Any]):
    """What differs in one value."""

    name = serializers.CharField()
    lines = DifferenceLine(many=True)


class EnvironmentDiff(serializers.Serializer[Any]):
    """Two versions, value by value; values that are equal are left out."""

    before = serializers.CharField(help_text="`name@version`.")
    after = serializers.CharField()
    differences = DifferenceOutput(many=True)


class TaskSetField(serializers.CharField):
    """A task set by its name or id."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the task set. Raises ValidationError."""
        value = super().to_internal_value(data)
        found = named(TaskSet.objects.all(), [value])
        if not found:
            raise serializers.ValidationError(f"There is no task set {value!r}.")
        return found[value]


class VerificationInput(StrictSerializer):
    """How an environment's version is to be verified."""

    task_set = TaskSetField(
        required=False,
        help_text="Name or id; left out: tasks that name the version, or else its other versions.",
    )
    tasks = serializers.IntegerField(
        required=False, default=10, min_value=1, max_value=MAX_TASKS, help_text="At most so many."
    )
    repeats = serializers.IntegerField(
        required=False,
        default=2,
        min_value=1,
        max_value=MAX_REPEATS,
        help_text="How often each task is solved and left alone.",
    )
    seed = serializers.IntegerField(
        required=False, default=0, min_value=0, max_value=MAX_SEED, help_text="Which tasks."
    )
    threshold = serializers.FloatField(
        required=False, default=1.0, help_text="From where on a reward is full."
    )
    tolerance = serializers.FloatField(
        required=False,
        default=0.0,
        min_value=0,
        max_value=1,
        help_text="Fraction of the tasks that may fail.",
    )
    deadline_seconds = serializers.FloatField(
        required=False, default=3600.0, min_value=DEADLINES[0], max_value=DEADLINES[1]
    )
    budgets = OptionsField(Budgets, required=False)


class VerificationOutput(serializers.ModelSerializer[Verification]):
    """A verification."""

    environment_ref = serializers.CharField(source="environment.ref", read_only=True)
    task_set = serializers.SlugRelatedField[TaskSet](slug_field="name", read_only=True)
    requested_by = serializers.CharField(
        source="requested_by.username", read_only=True, allow_null=True, default=None
    )

    class Meta:
        model = Verification
        fields = [
            "id",
            "environment",
            "environment_ref",
            "task_set",
            "state",
            "verdict",
            "task_count",
            "repeats",
            "seed",
            "threshold",
            "tolerance",
            "requested_by",
            "deadline_at",
            "created_at",
            "ended_at",
        ]
        read_only_fields = fields


class VerificationDetail(VerificationOutput):
    """A verification with how far it is and what it found; the report comes with its end."""

    rollouts = serializers.SerializerMethodField()
    rollouts_done = serializers.SerializerMethodField()
    report = JsonObjectField(read_only=True)

    class Meta(VerificationOutput.Meta):
        fields = [*VerificationOutput.Meta.fields, "rollouts", "rollouts_done", "report"]
        read_only_fields = fields

    def to_representation(self, instance: Verification) -> dict[str, Any]:
        """Count once for both numbers."""
        self._counts = done_of(instance)
        return super().to_representation(instance)

    def get_rollouts(self, _verification: Verification) -> int:
        """Return how many there are."""
        return self._counts[1]

    def get_rollouts_done(self, _verification: Verification) -> int:
        """Return how many are done."""
        return self._counts[0]
