"""Task sets and tasks: output."""

from rest_framework import serializers

from rollouts.models import Task, TaskSet
from sandboxes.api.strict import JsonObjectField


class TaskSetOutput(serializers.ModelSerializer[TaskSet]):
    """A task set and how many tasks it has."""

    task_count = serializers.IntegerField(read_only=True)

    class Meta:
        model = TaskSet
        fields = ["id", "name", "description", "task_count", "created_at"]
        read_only_fields = fields


class TaskOutput(serializers.ModelSerializer[Task]):
    """A task, without what only its evaluator may know."""

    environment = serializers.CharField(source="environment.ref", read_only=True)
    metadata = JsonObjectField(read_only=True)
    flaky = serializers.BooleanField(
        read_only=True, help_text="Its present content scored differently when it was repeated."
    )

    class Meta:
        model = Task
        fields = [
            "id",
            "task_set",
            "ref",
            "environment",
            "instruction",
            "metadata",
            "content_hash",
            "flaky",
            "created_at",
        ]
        read_only_fields = fields
