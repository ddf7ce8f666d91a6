"""Admin of policies and inference servers."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.admin.actions import act
from rollouts.inference.adapters import default_adapters
from rollouts.models import InferenceServer, Policy
from rollouts.services.servers import register_server, remove_server
from sandboxes.admin.base import BaseAdmin, ReadOnlyInline


class ServerInline(ReadOnlyInline):
    """Show a policy's servers."""

    model = InferenceServer
    fields = ["url", "kind", "state", "healthy", "detail", "checked_at"]


@admin.register(Policy)
class PolicyAdmin(BaseAdmin):
    """Edit policies; the trainer raises the version."""

    list_display = ["name", "owner", "model", "version", "context_tokens", "created_at"]
    list_select_related = ["owner"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    autocomplete_fields = ["owner"]
    fields = ["name", "owner", "model", "tokenizer", "context_tokens", "version", "created_at"]
    inlines = [ServerInline]

    def fixed_fields(self, obj: Any) -> list[str]:
        """Keep the version of a policy that exists: a trainer may raise it meanwhile."""
        return ["created_at", *(["name", "version"] if obj else [])]


class InferenceServerForm(forms.ModelForm):  # type: ignore[type-arg]
    """Offer the kinds that can be spoken to."""

    kind = forms.ChoiceField(choices=lambda: [(kind, kind) for kind in sorted(default_adapters())])

    class Meta:
        model = InferenceServer
        fields = ("policy", "url", "kind", "max_in_flight", "state")

    def clean_url(self) -> str:
        """Return the base address, and refuse schemes that are no inference server's."""
        url = str(self.cleaned_data["url"]).rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ValidationError("Use an http:// or https:// address.")
        return url


@admin.register(InferenceServer)
class InferenceServerAdmin(BaseAdmin):
    """Edit inference servers; removing one keeps its row."""

    form = InferenceServerForm
    list_display = ["url", "policy", "kind", "state", "healthy", "max_in_flight", "checked_at"]
    list_select_related = ["policy"]
    list_filter = ["state", "healthy", "policy"]
    search_fields = ["url"]
    search_prefixes = ("url",)
    autocomplete_fields = ["policy"]
    fields = [
        "policy",
        "url",
        "kind",
        "max_in_flight",
        "state",
        "healthy",
        "detail",
        "checked_at",
        "created_at",
    ]
    actions = ["remove"]

    def fixed_fields(self, obj: Any) -> list[str]:
        """Fix policy and address once registered: tokens are traced to them."""
        fixed = ["healthy", "detail", "checked_at", "created_at"]
        return [*fixed, "policy", "url"] if obj else [*fixed, "state"]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: a server is removed by its state, so that running work may finish."""
        return False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Register through the service; a server that is there already is set active again."""
        if change:
            super().save_model(request, obj, form, change)
            return
        saved = register_server(
            policy=obj.policy, url=obj.url, kind=obj.kind, max_in_flight=obj.max_in_flight
        )
        obj.pk, obj._state.adding = saved.pk, False

    @admin.action(description="Remove: send no new work there", permissions=["change"])
    def remove(self, request: HttpRequest, rows: QuerySet[InferenceServer]) -> None:
        """Remove servers from their policies."""
        act(self, request, rows, verb="Remove", call=lambda row: remove_server(server_id=row.pk))
