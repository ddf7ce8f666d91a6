"""Admin of what feeds draw from and of evaluation runs; all of it is shown only."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from rollouts.evaluation_statistics import Estimate
from rollouts.models import EvaluationRun, FeedPlan, FeedReturn, TaskProgress
from rollouts.services.evaluation_report import INTERVALS, report_of
from sandboxes.admin.base import ReadOnlyAdmin


@admin.register(EvaluationRun)
class EvaluationRunAdmin(ReadOnlyAdmin):
    """Show evaluation runs and what they found."""

    list_display = ["id", "experiment", "owner", "policy_version", "samples_per_task", "created_at"]
    list_select_related = ["experiment", "owner"]
    search_fields = ["id"]
    search_ids = ("id", "experiment")
    fields = [
        *("id", "experiment", "owner", "policy_version", "samples_per_task", "key", "threshold"),
        *("found", "intervals", "created_at"),
    ]
    readonly_fields = ["found", "intervals"]

    @admin.display(description="found so far")
    def found(self, run: EvaluationRun) -> str:
        """Return pass@k and the mean reward of each task set and over all."""
        report = report_of(run=run)
        lines = [
            (name, found.tasks, found.done, found.samples, found.nulls, _words(found.pass_at))
            for name, found in [*report.task_sets.items(), ("all", report.overall)]
        ]
        text = "{}: {} tasks, {} of {} samples done, {} nulls; {}"
        return format_html_join(" — ", text, [*lines]) or report.progress.state

    @admin.display(description="intervals")
    def intervals(self, run: EvaluationRun) -> str:
        """Return how the intervals are made."""
        return INTERVALS


@admin.register(FeedPlan)
class FeedPlanAdmin(ReadOnlyAdmin):
    """Show the plans of epochs, without their tasks."""

    list_display = ["id", "experiment", "epoch", "size", "created_at"]
    list_select_related = ["experiment"]
    search_fields = ["experiment"]
    search_ids = ("experiment",)
    fields = ["id", "experiment", "epoch", "size", "created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Leave out the tasks: 16 bytes for each."""
        return super().get_queryset(request).defer("tasks")


@admin.register(FeedReturn)
class FeedReturnAdmin(ReadOnlyAdmin):
    """Show the tasks that wait to be drawn again."""

    list_display = ["id", "experiment", "epoch", "position", "task", "reason", "created_at"]
    list_select_related = ["experiment", "task"]
    list_filter = ["reason"]
    search_fields = ["experiment"]
    search_ids = ("experiment", "task")
    fields = ["id", "experiment", "epoch", "position", "task", "reason", "created_at"]


@admin.register(TaskProgress)
class TaskProgressAdmin(ReadOnlyAdmin):
    """Show how often tasks were solved."""

    list_display = ["id", "experiment", "task", "groups", "samples", "right", "last_epoch"]
    list_select_related = ["experiment", "task"]
    search_fields = ["experiment"]
    search_ids = ("experiment", "task")
    fields = [
        *("id", "experiment", "task", "groups", "samples", "right", "last_epoch", "updated_at"),
    ]


def _words(passes: dict[int, Estimate]) -> str:
    """Return pass@k as text."""
    known = [(k, each) for k, each in passes.items() if each.value is not None]
    return ", ".join(
        f"pass@{k} {each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for k, each in known
    )
