"""Admin of task sets and tasks."""

import hashlib
import json
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest

from rollouts.models import Task, TaskSet
from sandboxes.admin.base import BaseAdmin, list_link


@admin.register(TaskSet)
class TaskSetAdmin(BaseAdmin):
    """Edit task sets; tasks come by import or one by one."""

    list_display = ["name", "description", "created_at", "shown"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    fields = ["name", "description", "shown", "created_at"]
    readonly_fields = ["shown", "created_at"]

    @admin.display(description="tasks")
    def shown(self, task_set: TaskSet) -> str:
        """Return a link to the set's tasks."""
        return list_link(Task, "tasks", task_set__id__exact=task_set.pk)


class TaskForm(forms.ModelForm):  # type: ignore[type-arg]
    """Check that the JSON columns hold objects."""

    class Meta:
        model = Task
        fields = (
            "task_set",
            "ref",
            "environment",
            "instruction",
            "payload",
            "hidden",
            "metadata",
        )

    def clean(self) -> dict[str, Any]:
        """Refuse JSON that is no object."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        for name in ("payload", "hidden", "metadata"):
            if name in values and not isinstance(values[name], dict):
                self.add_error(name, ValidationError("It must be a JSON object."))
        return values


class FlakyFilter(admin.SimpleListFilter):
    """Keep tasks that scored differently when they were repeated, or the others."""

    title = "flaky"
    parameter_name = "flaky"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two kinds."""
        return [("yes", "scored differently when repeated"), ("no", "the others")]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the chosen kind."""
        if self.value() == "yes":
            return queryset.flaky()
        return queryset.steady() if self.value() == "no" else queryset


@admin.register(Task)
class TaskAdmin(BaseAdmin):
    """Edit tasks; importing the set again writes over what was edited here."""

    form = TaskForm
    list_display = ["ref", "task_set", "environment", "flaky_shown", "created_at"]
    list_select_related = ["task_set", "environment"]
    list_filter = ["task_set", FlakyFilter]
    search_fields = ["ref"]
    search_ids = ("id", "task_set")
    search_prefixes = ("ref",)
    autocomplete_fields = ["task_set", "environment"]
    fields = [
        "task_set",
        "ref",
        "environment",
        "instruction",
        "payload",
        "hidden",
        "metadata",
        "content_hash",
        "flaky_shown",
        "flaky_evidence",
        "created_at",
    ]
    readonly_fields = ["content_hash", "flaky_shown", "flaky_evidence", "created_at"]

    @admin.display(description="flaky")
    def flaky_shown(self, task: Task) -> str:
        """Tell whether equal attempts at its present content were scored differently."""
        return "yes" if task.flaky else "no"

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save with a hash of its own, so that an import sees that the content differs."""
        content = [obj.instruction, obj.payload, obj.hidden, obj.metadata]
        obj.content_hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if change:
            obj.save(update_fields=[*form.changed_data, "content_hash"])
        else:
            obj.save(force_insert=True)
