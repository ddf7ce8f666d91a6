"""Admin of sandboxes."""

from django.contrib import admin

from sandboxes.admin.base import ReadOnlyAdmin
from sandboxes.models import Sandbox


@admin.register(Sandbox)
class SandboxAdmin(ReadOnlyAdmin):
    """Show sandboxes; workers start and end them."""

    list_display = ["id", "node", "purpose", "state", "owner", "created_at", "gone_at"]
    list_select_related = ["node"]
    list_filter = ["state", "node"]
    search_fields = ["id"]
    search_ids = ("id", "owner")
