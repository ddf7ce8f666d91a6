"""Imports of tasks: input and output."""

import json
from typing import Any

from rest_framework import serializers

from rollouts.importers.formats import FORMATS
from rollouts.models import RejectedRow, TaskImport
from sandboxes.api.strict import JsonObjectField, StrictSerializer


class ImportSettings(StrictSerializer):
    """What an import is to do with what it reads."""

    set_name = serializers.CharField(max_length=99, help_text="The task set; made when new.")
    format = serializers.ChoiceField(
        choices=sorted(FORMATS), required=False, help_text="Left out: told by the content."
    )
    environment = serializers.CharField(
        max_length=120,
        required=False,
        help_text="name or name@version for all tasks; left out: one for each need they have.",
    )
    description = serializers.CharField(required=False, help_text="Of a task set that is new.")


class ImportInput(ImportSettings):
    """What to import: a file or folder below one that the operator opened for it."""

    path = serializers.CharField(max_length=4096)
    options = JsonObjectField(required=False, help_text="See docs/importing.md.")


class UploadQuery(ImportSettings):
    """What to do with an upload, which is the call's body."""

    name = serializers.CharField(max_length=500, required=False, help_text="The file's name.")
    options = serializers.CharField(required=False, help_text="A JSON object.")

    def validate_options(self, text: str) -> dict[str, Any]:
        """Return the object. Raises ValidationError."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise serializers.ValidationError("Must be a JSON object.")
        return value


class TaskImportOutput(serializers.ModelSerializer[TaskImport]):
    """An import of tasks and how far it is."""

    environment = serializers.CharField(
        source="environment.ref", read_only=True, allow_null=True, default=None
    )
    requested_by = serializers.CharField(
        source="requested_by.username", read_only=True, allow_null=True, default=None
    )
    options = JsonObjectField(read_only=True)
    progress = serializers.SerializerMethodField(help_text="0 to 1; null: nobody knows.")

    class Meta:
        model = TaskImport
        fields = [
            *("id", "set_name", "task_set", "format", "source", "name", "environment", "options"),
            *("state", "requested_by", "created", "changed", "unchanged", "rejected", "number"),
            *("progress", "attempts", "error_code", "error"),
            *("created_at", "started_at", "ended_at"),
        ]
        read_only_fields = fields

    def get_progress(self, job: TaskImport) -> float | None:
        """Return which part of the source is done."""
        if not job.total:
            return None
        return round(min(1.0, job.offset / job.total), 4)


class RejectedRowOutput(serializers.ModelSerializer[RejectedRow]):
    """A row or folder that was refused, and why."""

    class Meta:
        model = RejectedRow
        fields = ["number", "place", "reason", "raw"]
        read_only_fields = fields
