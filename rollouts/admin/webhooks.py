"""Admin of webhooks and of what was sent to them; the secret is shown to nobody."""

from django.contrib import admin

from rollouts.models import Webhook, WebhookDelivery
from sandboxes.admin.base import ReadOnlyAdmin


@admin.register(Webhook)
class WebhookAdmin(ReadOnlyAdmin):
    """Show the addresses that events go to."""

    list_display = ["url", "experiment", "active", "detail", "created_at"]
    list_select_related = ["experiment"]
    list_filter = ["active"]
    search_fields = ["url"]
    search_ids = ("id", "experiment")
    fields = ["id", "experiment", "url", "kinds", "active", "detail", "created_at"]


@admin.register(WebhookDelivery)
class WebhookDeliveryAdmin(ReadOnlyAdmin):
    """Show events on their way, and what the last try met."""

    list_display = ["kind", "webhook", "tries", "next_at", "delivered_at", "detail", "created_at"]
    list_select_related = ["webhook"]
    list_filter = ["kind"]
    search_fields = ["id"]
    search_ids = ("id", "webhook")
    fields = [
        *("id", "webhook", "kind", "body", "tries", "next_at", "delivered_at", "detail"),
        "created_at",
    ]
