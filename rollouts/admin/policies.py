"""Admin of policies and inference servers."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.admin.actions import act
from rollouts.exceptions import InvalidValue
from rollouts.inference.adapters import default_adapters
from rollouts.models import InferenceServer, Policy, PolicyUpdate
from rollouts.services.policies import is_used
from rollouts.services.policy_alarms import alarm_of, alarm_of_policy, last_updates
from rollouts.services.policy_updates import (
    abandon_update,
    begin_update,
    complete_update,
    still_running,
)
from rollouts.services.servers import check_kind, register_server, remove_server
from rollouts.states import UpdateMode
from sandboxes.admin.base import BaseAdmin, ReadOnlyAdmin, ReadOnlyInline


class ServerInline(ReadOnlyInline):
    """Show a policy's servers."""

    model = InferenceServer
    fields = ["url", "kind", "state", "healthy", "detail", "checked_at"]


class UpdateInline(ReadOnlyInline):
    """Show a policy's updates, the newest first."""

    model = PolicyUpdate
    fields = ["number", "from_version", "to_version", "mode", "state", "detail", "created_at"]
    ordering = ["-number"]
    max_num = 20


@admin.register(PolicyUpdate)
class PolicyUpdateAdmin(ReadOnlyAdmin):
    """Show weight updates; complete and abandon them."""

    list_display = ["id", "policy", "number", "from_version", "to_version", "mode", "state"]
    list_select_related = ["policy"]
    list_filter = ["state", "mode", "policy"]
    search_fields = ["id"]
    fields = (
        *("id", "policy", "number", "from_version", "to_version", "mode", "control", "state"),
        *("alarm", "detail", "under_way", "servers", "requested_by"),
        *("created_at", "paused_at", "ready_at", "ended_at", "released_at"),
    )
    readonly_fields = fields
    actions = ["complete", "abandon"]

    @admin.display(description="alarm", empty_value="none")
    def alarm(self, update: PolicyUpdate) -> str:
        """Return whether it is about to time out, or did."""
        return alarm_of(update)

    @admin.display(description="under way")
    def under_way(self, update: PolicyUpdate) -> str:
        """Return how many generations and rollouts of the policy still run."""
        calls, rollouts = still_running(policy_id=update.policy_id)
        said = "unknown: the routing store does not answer" if calls is None else str(calls)
        return f"generations: {said}; rollouts: {rollouts}"

    @admin.action(description="Complete: go on with the new version", permissions=["operate"])
    def complete(self, request: HttpRequest, rows: QuerySet[PolicyUpdate]) -> None:
        """Complete updates."""
        act(
            self,
            request,
            rows,
            verb="Complete",
            call=lambda row: complete_update(policy_id=row.policy_id, number=row.number),
        )

    @admin.action(description="Abandon: go on with the old version", permissions=["operate"])
    def abandon(self, request: HttpRequest, rows: QuerySet[PolicyUpdate]) -> None:
        """Abandon updates."""
        why = f"Abandoned by {request.user} in the admin."
        act(
            self,
            request,
            rows,
            verb="Abandon",
            call=lambda row: abandon_update(policy_id=row.policy_id, number=row.number, why=why),
        )


@admin.register(Policy)
class PolicyAdmin(BaseAdmin):
    """Edit policies, begin their updates; the trainer raises the version."""

    list_display = ["name", "owner", "model", "version", "alarm", "context_tokens", "created_at"]
    list_select_related = ["owner"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    autocomplete_fields = ["owner"]
    fields = [
        *("name", "owner", "model", "tokenizer", "context_tokens", "version", "alarm"),
        "created_at",
    ]
    inlines = [ServerInline, UpdateInline]
    actions = ["begin_drain_calls", "begin_drain_rollouts", "begin_abort"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Policy]:
        """Read the last update of each along."""
        rows: QuerySet[Policy] = super().get_queryset(request).prefetch_related(last_updates())
        return rows

    @admin.display(description="alarm", empty_value="none")
    def alarm(self, policy: Policy) -> str:
        """Return what is wrong with its last update."""
        return alarm_of_policy(policy)

    def fixed_fields(self, obj: Any) -> list[str]:
        """Keep the version of a policy that exists: a trainer may raise it meanwhile.

        While rollouts sample from it, model and tokenizer stay too: their ids are of these.
        """
        if obj is None:
            return ["created_at", "alarm"]
        return [
            "created_at",
            "alarm",
            "name",
            "version",
            *(["model", "tokenizer"] if is_used(obj) else []),
        ]

    @admin.action(
        description="Begin an update to the next version: let generations end",
        permissions=["change"],
    )
    def begin_drain_calls(self, request: HttpRequest, rows: QuerySet[Policy]) -> None:
        """Begin updates that wait for running generations."""
        self._begin(request, rows, UpdateMode.DRAIN_CALLS)

    @admin.action(
        description="Begin an update to the next version: let rollouts end", permissions=["change"]
    )
    def begin_drain_rollouts(self, request: HttpRequest, rows: QuerySet[Policy]) -> None:
        """Begin updates that wait for running rollouts."""
        self._begin(request, rows, UpdateMode.DRAIN_ROLLOUTS)

    @admin.action(
        description="Begin an update to the next version: cut generations", permissions=["change"]
    )
    def begin_abort(self, request: HttpRequest, rows: QuerySet[Policy]) -> None:
        """Begin updates that cut running generations."""
        self._begin(request, rows, UpdateMode.ABORT)

    def _begin(self, request: HttpRequest, rows: QuerySet[Policy], mode: str) -> None:
        act(
            self,
            request,
            rows,
            verb="Begin",
            call=lambda row: begin_update(
                policy_id=row.pk, version=row.version + 1, mode=mode, asked_by=request.user
            ),
        )


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

    def clean(self) -> dict[str, Any]:
        """Refuse kinds that do not fit the policy."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        policy = values.get("policy") or getattr(self.instance, "policy", None)
        if policy is not None and "kind" in values:
            try:
                check_kind(policy=policy, kind=values["kind"])
            except InvalidValue as reason:
                raise ValidationError({"kind": str(reason)}) from reason
        return values


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
