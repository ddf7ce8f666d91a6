"""Admin of evaluations and re-evaluations: what was scored, by what, and what was kept of it."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from rollouts.admin.actions import act
from rollouts.admin.ordering import BY_ROLLOUT
from rollouts.exceptions import NotThere
from rollouts.models import Evaluation, Reevaluation, Rollout
from rollouts.services.artefacts import read_evidence
from rollouts.services.reevaluation_report import report_reevaluation
from rollouts.services.reevaluations import cancel_reevaluation
from sandboxes.admin.base import ReadOnlyAdmin, list_link, object_link


@admin.register(Evaluation)
class EvaluationAdmin(ReadOnlyAdmin):
    """Show scorings and hand out what was kept of them."""

    list_display = ["id", "rollout", "evaluator", "source", "reward", "code", "created_at"]
    list_select_related = ["rollout"]
    list_filter = ["source", "created_at"]
    search_fields = ["id"]
    search_ids = ("id", "rollout", "reevaluation")
    ordering = BY_ROLLOUT
    fields = [
        "id",
        "rollout",
        "source",
        "reevaluation",
        "evaluator",
        "evaluator_version",
        "settings_digest",
        "reward",
        "rewards",
        "turn_rewards",
        "code",
        "details",
        "log",
        "evidence",
        "evidence_sha256",
        "created_at",
    ]
    readonly_fields = ["evidence"]

    def get_urls(self) -> list[Any]:
        """Add the page that hands out what was kept."""
        own = path(
            "<uuid:pk>/evidence/",
            self.admin_site.admin_view(self.evidence_page),
            name="rollouts_evaluation_evidence",
        )
        return [own, *super().get_urls()]

    def evidence_page(self, request: HttpRequest, pk: Any) -> HttpResponse:
        """Return what the evaluator was given."""
        evaluation = get_object_or_404(Evaluation, pk=pk)
        if not self.has_view_permission(request, evaluation):
            raise Http404
        try:
            packed = read_evidence(evaluation=evaluation)
        except NotThere as lost:
            raise Http404(str(lost)) from None
        response = HttpResponse(packed, content_type="application/gzip")
        response["Content-Disposition"] = f'attachment; filename="{pk}.evidence.json.gz"'
        return response

    @admin.display(description="evidence")
    def evidence(self, evaluation: Evaluation) -> str | SafeString:
        """Return a link to what the evaluator was given."""
        if not evaluation.evidence_path:
            return "nothing was kept"
        address = reverse("admin:rollouts_evaluation_evidence", args=[evaluation.pk])
        size = evaluation.evidence_size_bytes
        return format_html('<a href="{}">{} ({} bytes)</a>', address, "download", size)


@admin.register(Reevaluation)
class ReevaluationAdmin(ReadOnlyAdmin):
    """Show experiments that were scored again; cancel those that go on."""

    list_display = ["id", "experiment", "evaluator", "state", "created_at", "ended_at"]
    list_select_related = ["experiment"]
    list_filter = ["state", "created_at"]
    search_fields = ["id"]
    search_ids = ("id", "experiment")
    ordering = ["-created_at", "-id"]
    actions = ["cancel"]
    fields = [
        "id",
        "experiment",
        "owner",
        "evaluator",
        "evaluator_settings",
        "environment",
        "state",
        "report",
        "cancel_requested_at",
        "created_at",
        "ended_at",
    ]
    readonly_fields = ["report"]

    @admin.display(description="report")
    def report(self, job: Reevaluation) -> SafeString:
        """Return how far it is, the means, and the rollouts that differ most."""
        found = report_reevaluation(job=job)
        faults = "".join(f", {count} {code}" for code, count in found.faults.items())
        reached = list_link(Evaluation, f"{found.done} of {found.total}", reevaluation=job.pk)
        lines = [format_html("{} rollouts: {} scored{}", reached, found.scored, faults)]
        if found.agreement is not None:
            lines.append(
                format_html(
                    "mean {} before, {} now; {} agree, {} differ",
                    f"{found.mean_before:.4g}",
                    f"{found.mean_after:.4g}",
                    f"{found.agreement:.1%}",
                    found.changed_count,
                )
            )
        for each in found.changed:
            rollout = object_link(Rollout(pk=each.rollout), each.task_ref)
            lines.append(format_html("{}: {} → {}", rollout, f"{each.before:g}", f"{each.after:g}"))
        return format_html_join("", "<div>{}</div>", ((line,) for line in lines))

    @admin.action(description="Cancel selected re-evaluations", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[Reevaluation]) -> None:
        """Cancel what goes on; the rest is told as skipped."""
        act(self, request, rows, verb="Cancel", call=lambda row: cancel_reevaluation(job=row))
