"""Admin of worker processes."""

from django.contrib import admin
from django.utils import timezone

from rollouts.models import Worker
from sandboxes.admin.base import ReadOnlyAdmin


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """Show worker processes and whether their lease holds."""

    list_display = [
        "id",
        "node",
        "stage",
        "pid",
        "concurrency",
        "live",
        "started_at",
        "lease_expires_at",
        "ended_at",
    ]
    list_select_related = ["node"]
    list_filter = ["stage", "node"]
    search_fields = ["id"]
    search_ids = ("id", "node")
    fields = [
        "id",
        "node",
        "stage",
        "pid",
        "concurrency",
        "live",
        "started_at",
        "lease_expires_at",
        "ended_at",
    ]
    readonly_fields = ["live"]

    @admin.display(description="live", boolean=True)
    def live(self, worker: Worker) -> bool:
        """Return whether the process holds its lease."""
        return worker.ended_at is None and worker.lease_expires_at > timezone.now()
