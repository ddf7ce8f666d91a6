"""Admin of batches and remembered calls."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.admin.actions import act
from rollouts.exceptions import StateConflict
from rollouts.models import Batch, Group, IdempotencyRecord
from rollouts.services.batches import return_batch
from rollouts.states import BatchState
from sandboxes.admin.base import ReadOnlyAdmin, ReadOnlyInline


class GroupInline(ReadOnlyInline):
    """Show the groups of a batch."""

    model = Group
    fk_name = "batch"
    fields = ["sequence", "task", "state", "done_count", "size", "ready_at"]
    ordering = ["sequence"]

    def get_queryset(self, request: HttpRequest) -> "QuerySet[Group]":
        """Return the groups with their tasks."""
        return super().get_queryset(request).select_related("task")


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    """Show batches; give back what a trainer holds and will not acknowledge."""

    list_display = [
        "id",
        "experiment",
        "number",
        "owner",
        "state",
        "group_count",
        "policy_version",
        "max_lag",
        "lease_expires_at",
        "created_at",
        "closed_at",
    ]
    list_select_related = ["experiment", "owner"]
    list_filter = ["state"]
    search_fields = ["id"]
    search_ids = ("id", "experiment")
    fields = [
        "id",
        "experiment",
        "number",
        "repeats",
        "owner",
        "state",
        "group_count",
        "policy_version",
        "max_lag",
        "lease_expires_at",
        "created_at",
        "closed_at",
    ]
    inlines = [GroupInline]
    actions = ["give_back"]

    @admin.action(description="Return: let the groups be leased again", permissions=["operate"])
    def give_back(self, request: HttpRequest, rows: QuerySet[Batch]) -> None:
        """Return leased batches."""
        act(self, request, rows, verb="Return", call=_return)


def _return(batch: Batch) -> None:
    if batch.state != BatchState.LEASED:
        raise StateConflict(f"The batch is {batch.state}; only a leased one can be returned.")
    return_batch(batch_id=batch.pk)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    """Show remembered creating calls."""

    list_display = ["id", "owner", "key", "route", "status", "created_at"]
    list_select_related = ["owner"]
    list_filter = ["created_at"]
    search_fields = ["key"]
    search_ids = ()
    search_prefixes = ("key",)
    fields = ["id", "owner", "key", "route", "fingerprint", "status", "body", "created_at"]
