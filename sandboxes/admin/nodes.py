"""Admin of nodes."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from sandboxes.admin.actions import Skip, carry_out
from sandboxes.admin.base import BaseAdmin, list_link
from sandboxes.models import Node, Sandbox
from sandboxes.services.drain import set_draining


@admin.register(Node)
class NodeAdmin(BaseAdmin):
    """Edit capacity, drain and undrain."""

    list_display = ["name", "capacity", "slots_used", "drained", "leaked", "seen_at"]
    list_filter = ["draining"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    fields = [
        *("name", "capacity", "draining", "sandboxes", "enforcement", "leaked"),
        *("seen_at", "created_at"),
    ]
    readonly_fields = ["sandboxes", "enforcement", "leaked", "seen_at", "created_at"]
    actions = ["drain", "undrain"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        """Return the nodes with the slots that they use."""
        return Node.objects.with_slots_used()

    def fixed_fields(self, obj: Any) -> list[str]:
        """Fix the name once the node is there: its workers know it by that."""
        return [*self.readonly_fields, *(["name"] if obj else [])]

    @admin.display(description="slots used")
    def slots_used(self, node: Any) -> int:
        """Return how many sandbox slots are taken."""
        return int(node.slots_used)

    @admin.display(description="draining", ordering="draining")
    def drained(self, node: Node) -> str:
        """Return a word: a green sign would read as if all were well."""
        return "yes" if node.draining else "no"

    @admin.display(description="sandboxes")
    def sandboxes(self, node: Node) -> str:
        """Return a link to the node's sandboxes."""
        return list_link(Sandbox, "show", node__id__exact=node.pk)

    @admin.action(description="Drain: start nothing new there", permissions=["change"])
    def drain(self, request: HttpRequest, rows: QuerySet[Node]) -> None:
        """Drain nodes."""
        carry_out(self, request, rows, verb="Drain", call=lambda node: _set(node, True))

    @admin.action(description="Undrain: start there again", permissions=["change"])
    def undrain(self, request: HttpRequest, rows: QuerySet[Node]) -> None:
        """Take nodes back into use."""
        carry_out(self, request, rows, verb="Undrain", call=lambda node: _set(node, False))


def _set(node: Node, draining: bool) -> None:
    if not set_draining(node_id=node.pk, draining=draining):
        raise Skip("is drained already." if draining else "is in use already.")
