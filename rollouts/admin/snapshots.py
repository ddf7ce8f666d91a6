"""Admin of snapshots."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.services.snapshots import delete_snapshot
from sandboxes.admin.actions import Refused, carry_out
from sandboxes.admin.base import ReadOnlyAdmin
from sandboxes.models import Snapshot


@admin.register(Snapshot)
class SnapshotAdmin(ReadOnlyAdmin):
    """Show kept states of sandboxes, and delete them."""

    list_display = ["id", "owner", "environment", "turn", "state", "node", "created_at"]
    list_select_related = ["environment", "node"]
    list_filter = ["state", "node"]
    search_fields = ["id"]
    search_ids = ("id", "owner")
    fields = [
        *("id", "owner", "environment", "turn", "state", "node", "layers", "workdir"),
        *("detail", "created_at", "ready_at"),
    ]
    actions = ["forget"]

    @admin.action(
        description="Delete: the layer goes with the node's next sweep", permissions=["operate"]
    )
    def forget(self, request: HttpRequest, rows: QuerySet[Snapshot]) -> None:
        """Delete snapshots that no unfinished group starts from."""
        carry_out(self, request, rows, verb="Delete", call=_forget)


def _forget(snapshot: Any) -> None:
    if not delete_snapshot(snapshot_id=snapshot.pk):
        raise Refused("an unfinished group starts from it.")
