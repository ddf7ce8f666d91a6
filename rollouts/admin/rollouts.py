"""Admin of rollouts, attempts and the journal."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from rollouts.admin.actions import act
from rollouts.admin.ordering import BY_ROLLOUT
from rollouts.models import Attempt, Evaluation, JournalEntry, Rollout
from rollouts.services.cancel import cancel_rollout
from rollouts.services.requeue import retry_rollout
from sandboxes.admin.base import ReadOnlyAdmin, ReadOnlyInline, list_link, object_link
from sandboxes.models import Sandbox


class AttemptInline(ReadOnlyInline):
    """Show a rollout's tries."""

    model = Attempt
    fields = ["stage", "number", "state", "node", "started_at", "ended_at", "failure_code"]
    ordering = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the tries with their nodes."""
        return super().get_queryset(request).select_related("node")


class EvaluationInline(ReadOnlyInline):
    """Show a rollout's scorings."""

    model = Evaluation
    fields = ["evaluator", "source", "reward", "rewards", "code", "created_at"]


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyAdmin):
    """Show rollouts; cancel them, and try again what ended without a score."""

    list_display = [
        "id",
        "state",
        "outcome",
        "reward",
        "failure_code",
        "task",
        "sample",
        "experiment",
        "turns",
        "created_at",
    ]
    list_select_related = ["experiment", "group__task"]
    list_filter = ["state", "outcome", "created_at"]
    search_fields = ["id"]
    search_ids = ("id", "group", "experiment")
    ordering = ["-created_at", "-id"]
    inlines = [AttemptInline, EvaluationInline]
    actions = ["cancel", "retry"]
    fieldsets = [
        (
            None,
            {
                "fields": [
                    "id",
                    "state",
                    "outcome",
                    "reward",
                    "rewards",
                    "stop_reason",
                    "failure_code",
                    "failure_detail",
                    "links",
                ]
            },
        ),
        (
            "Where it belongs",
            {"fields": ["experiment", "group", "task", "environment", "sample", "node"]},
        ),
        (
            "What the agent did",
            {"fields": ["turns", "tool_calls", "sampled_tokens", "answer", "last_message"]},
        ),
        (
            "Times",
            {
                "fields": [
                    "created_at",
                    "queued_at",
                    "not_before",
                    "cancel_requested_at",
                    "done_at",
                    "restarts",
                    "timings",
                ]
            },
        ),
    ]
    readonly_fields = ["links", "task"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Rollout]:
        """Return the rollouts without the texts that a list does not show."""
        rows = super().get_queryset(request)
        match = request.resolver_match
        if match is not None and str(match.url_name).endswith("_changelist"):
            return rows.defer("last_message", "answer", "failure_detail", "timings", "rewards")
        return rows

    @admin.display(description="task")
    def task(self, rollout: Rollout) -> str:
        """Return a link to the task."""
        return object_link(rollout.group.task)

    @admin.display(description="see")
    def links(self, rollout: Rollout) -> str:
        """Return links to what belongs to the rollout."""
        found: list[str] = [
            list_link(Attempt, "attempts", rollout__id__exact=rollout.pk),
            list_link(JournalEntry, "journal", rollout__id__exact=rollout.pk),
            list_link(Sandbox, "sandboxes", owner=rollout.pk),
        ]
        trajectory = getattr(rollout, "trajectory", None)
        if trajectory is not None:
            found.insert(0, object_link(trajectory, "trajectory"))
        return format_html_join(" · ", "{}", ((link,) for link in found))

    @admin.action(description="Cancel", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[Rollout]) -> None:
        """Cancel rollouts; their workers see it within a second."""
        act(self, request, rows, verb="Cancel", call=lambda row: cancel_rollout(rollout_id=row.pk))

    @admin.action(description="Try again what ended without a score", permissions=["operate"])
    def retry(self, request: HttpRequest, rows: QuerySet[Rollout]) -> None:
        """Send rollouts back to the queue."""
        act(self, request, rows, verb="Retry", call=lambda row: retry_rollout(rollout_id=row.pk))


@admin.register(Attempt)
class AttemptAdmin(ReadOnlyAdmin):
    """Show tries at stages."""

    list_display = [
        "id",
        "rollout",
        "stage",
        "number",
        "state",
        "failure_code",
        "node",
        "process",
        "started_at",
        "ended_at",
    ]
    list_select_related = ["rollout", "node", "worker"]
    list_filter = ["state", "stage"]
    search_fields = ["id"]
    search_ids = ("id", "rollout", "worker")
    ordering = BY_ROLLOUT
    fields = [
        "id",
        "rollout",
        "stage",
        "number",
        "state",
        "failure_code",
        "failure_detail",
        "node",
        "process",
        "budget_seconds",
        "created_at",
        "published_at",
        "publish_count",
        "started_at",
        "ended_at",
        "lease_token",
    ]
    readonly_fields = ["process"]

    @admin.display(description="worker", ordering="worker")
    def process(self, attempt: Attempt) -> str:
        """Return a link to the worker process; its node stands beside it."""
        worker = attempt.worker
        return "-" if worker is None else object_link(worker, f"{worker.stage}:{worker.pid}")


@admin.register(JournalEntry)
class JournalEntryAdmin(ReadOnlyAdmin):
    """Show finished steps of running episodes."""

    list_display = ["id", "rollout", "restarts", "turn", "kind", "created_at"]
    list_select_related = ["rollout"]
    search_fields = ["rollout"]
    search_ids = ("rollout", "attempt")
    ordering = ["-id"]
    fields = ["id", "rollout", "attempt", "restarts", "turn", "kind", "body", "created_at"]
