"""Admin of environments: saving makes a new version."""

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import IS_POPUP_VAR
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from evaluators.registry import EVALUATORS
from rollouts.admin.actions import act
from rollouts.admin.environment_pages import diff_page, export_page, import_page
from rollouts.admin.prompt_preview import preview_page
from rollouts.handlers.registry import HANDLERS
from rollouts.models import Verification
from rollouts.services.environment_check import environment_errors
from rollouts.services.verifications import begin_verification
from sandboxes.admin.base import BaseAdmin, list_link
from sandboxes.models import Environment, Node
from sandboxes.services.catalogue import ENVIRONMENT_VALUES, save_environment
from sandboxes.states import Network, Verified

SAVED = ENVIRONMENT_VALUES
COLOURS = {Verified.BROKEN: "#ba2121", Verified.VERIFIED: "#1a7f37"}


class EnvironmentForm(forms.ModelForm):  # type: ignore[type-arg]
    """Check names and settings against the agents, tools and evaluators that exist."""

    agent = forms.ChoiceField(
        choices=lambda: [(name, f"{name}: {HANDLERS[name].description}") for name in HANDLERS]
    )
    evaluator = forms.ChoiceField(
        choices=lambda: [(name, f"{name}: {EVALUATORS[name].description}") for name in EVALUATORS]
    )

    class Meta:
        model = Environment
        fields = ("name", *SAVED)

    def clean(self) -> dict[str, Any]:
        """Refuse what no worker could run."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        for name in ("files", "secrets"):
            if name in values:
                values[name] = values[name] or {}  # an emptied box means none
        if not self.errors:
            for field, reason in list(environment_errors(values)):
                self.add_error(field, ValidationError(reason))
        return values


@admin.register(Environment)
class EnvironmentAdmin(BaseAdmin):
    """Edit the catalogue; a version that exists is never changed."""

    form = EnvironmentForm
    change_form_template = "admin/sandboxes/environment/change_form.html"
    change_list_template = "admin/sandboxes/environment/change_list.html"
    list_display = [
        *("ref", "image", "agent", "evaluator", "network_shown", "verification_shown"),
        "created_at",
    ]
    list_select_related = ["image"]
    list_filter = ["verification", "agent", "evaluator", "network"]
    actions = ["verify"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    autocomplete_fields = ["image"]
    readonly_fields = [
        "version",
        "kept_on_nodes",
        "verification_shown",
        "verified_at",
        "created_at",
    ]
    fieldsets = [
        (None, {"fields": ["name", "version", "description", "created_at"]}),
        ("Verification", {"fields": ["verification_shown", "verified_at"]}),
        (
            "Sandbox",
            {
                "fields": [
                    *("image", "setup", "files", "workdir", "network", "egress_hosts", "gpu"),
                    *("warm", "limits", "secrets", "kept_on_nodes"),
                ]
            },
        ),
        (
            "Agent",
            {
                "fields": [
                    *("agent", "agent_settings", "prompt_format", "system_prompt"),
                    *("tools", "tool_settings"),
                ]
            },
        ),
        ("Evaluator", {"fields": ["evaluator", "evaluator_settings"]}),
    ]

    def get_urls(self) -> list[Any]:
        """Add the pages for the prompt, the file and what differs between versions."""
        pages = (
            ("<uuid:pk>/prompt/", self.prompt_view, "prompt"),
            ("<uuid:pk>/export/", self.export_view, "export"),
            ("<uuid:pk>/diff/", self.diff_view, "diff"),
            ("import/", self.import_view, "import"),
        )
        own = [
            path(route, self.admin_site.admin_view(view), name=f"sandboxes_environment_{name}")
            for route, view, name in pages
        ]
        return [*own, *super().get_urls()]

    def export_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Answer with the version as a TOML file."""
        return export_page(self, request, pk)

    def diff_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Show what differs from another version."""
        return diff_page(self, request, pk)

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """Take a TOML file."""
        return import_page(self, request)

    @admin.action(description="Verify with ten of their tasks", permissions=["change"])
    def verify(self, request: HttpRequest, rows: QuerySet[Environment]) -> None:
        """Begin a verification of each version, with what the API takes where nothing is said."""
        act(
            self,
            request,
            rows,
            verb="Verify",
            call=lambda row: begin_verification(environment=row, requested_by=request.user),
        )

    @admin.display(description="verification", ordering="verification")
    def verification_shown(self, environment: Environment) -> str:
        """Return what was found, as a badge that leads to the reports."""
        found = environment.verification
        badge = format_html(
            '<strong style="color:{}">{}</strong>',
            COLOURS.get(Verified(found), "inherit"),
            environment.get_verification_display(),
        )
        return list_link(Verification, badge, environment__id__exact=environment.pk)

    def prompt_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Show the first prompt as a policy's model will see it."""
        environment = get_object_or_404(Environment, pk=pk)
        if not self.has_view_permission(request, environment):
            raise PermissionDenied
        page = {
            **self.admin_site.each_context(request),
            "title": f"{environment.ref} as the model sees it",
            "opts": self.opts,
            "environment": environment,
            **preview_page(request, environment),
        }
        return TemplateResponse(request, "admin/sandboxes/environment/prompt.html", page)

    def fixed_fields(self, obj: Any) -> list[str]:
        """Fix the name of an environment that exists: another name is another environment."""
        return [*self.readonly_fields, *(["name"] if obj else [])]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: a number would be given twice, and rollouts name the version they ran with."""
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Environment]:
        """Return every version, the newest of a name first."""
        return super().get_queryset(request).order_by("name", "-version").defer("files")

    @admin.display(description="network", ordering="network")
    def network_shown(self, environment: Environment) -> str:
        """Return the network; access to the host's is shown in red."""
        if environment.network != Network.HOST:
            return str(environment.get_network_display())
        return format_html(
            '<strong style="color:#ba2121">{}</strong>', environment.get_network_display()
        )

    @admin.display(description="limits kept")
    def kept_on_nodes(self, _environment: Environment) -> str:
        """Return how each node keeps each limit, "none" in red."""
        nodes = [node for node in Node.objects.order_by("name") if node.enforcement]
        if not nodes:
            return "no node has told yet"
        return format_html_join(
            "",
            "<div><strong>{}</strong>: {}</div>",
            ((node.name, _kept(node.enforcement)) for node in nodes),
        )

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Make a new version with these values and say so; equal values make none."""
        before = Environment.objects.filter(name=obj.name).order_by("-version").first()
        saved = save_environment(name=obj.name, **{name: getattr(obj, name) for name in SAVED})
        obj.pk, obj.version, obj.created_at = saved.pk, saved.version, saved.created_at
        obj._state.adding = False
        if before is not None and saved.pk == before.pk:
            text, level = f"Nothing differs from {saved.ref}: no new version.", messages.WARNING
        elif before is not None:
            text = (
                f"Saved as the new version {saved.ref}; rollouts that were submitted keep theirs."
            )
            level = messages.SUCCESS
        else:
            text, level = f"Saved as the first version, {saved.ref}.", messages.SUCCESS
        self.message_user(request, text, level)
        if saved.network == Network.HOST:
            self.message_user(
                request, f"{saved.ref} lets agents reach the host's network.", messages.WARNING
            )

    def response_add(
        self, request: HttpRequest, obj: Any, post_url_continue: str | None = None
    ) -> HttpResponse:
        """Go on as asked; what became of the form was said at saving."""
        return self._next_page(request, obj) or super().response_add(
            request, obj, post_url_continue
        )

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        """Go on to the version that was made: editing the old one would undo the new one."""
        return self._next_page(request, obj) or super().response_change(request, obj)

    def _next_page(self, request: HttpRequest, obj: Any) -> HttpResponse | None:
        """Return the page that follows saving; None where Django's own answer is needed."""
        if {IS_POPUP_VAR, "_addanother"} & request.POST.keys():
            return None
        if "_continue" in request.POST:
            return redirect("admin:sandboxes_environment_change", obj.pk)
        return self.response_post_save_change(request, obj)


def _kept(enforcement: dict[str, str]) -> SafeString:
    return format_html_join(
        ", ",
        '<span style="{}">{} {}</span>',
        (
            ("color:#ba2121" if how == "none" else "", limit, f"by {how}" if how != "none" else how)
            for limit, how in sorted(enforcement.items())
        ),
    )
