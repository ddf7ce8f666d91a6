"""Admin of sandboxes."""

from typing import ClassVar

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html

from sandboxes.admin.base import ReadOnlyAdmin
from sandboxes.admin.shown import short_id
from sandboxes.models import Sandbox


@admin.register(Sandbox)
class SandboxAdmin(ReadOnlyAdmin):
    """Show sandboxes; workers start and end them.

    `owner_page` names the page that shows an owner; who owns sandboxes sets it.
    """

    owner_page: ClassVar[str] = ""
    list_display = ["id", "owned_by", "purpose", "state", "node", "created_at", "gone_at"]
    list_select_related = ["node"]
    list_filter = ["state", "node"]
    search_fields = ["id"]
    search_ids = ("id", "owner")
    fields = [
        "id",
        "owned_by",
        "node",
        "purpose",
        "state",
        "handle",
        "layers",
        "frozen_layer",
        "created_at",
        "ready_at",
        "gone_at",
    ]
    readonly_fields = ["owned_by"]

    @admin.display(description="owner", ordering="owner")
    def owned_by(self, sandbox: Sandbox) -> str:
        """Return a link to the owner where its page is known."""
        shown = short_id(sandbox.owner)
        if not self.owner_page:
            return shown
        address = reverse(self.owner_page, args=[sandbox.owner])
        return format_html('<a href="{}">{}</a>', address, shown)
