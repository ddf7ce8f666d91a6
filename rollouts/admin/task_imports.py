"""Admin of imports: upload a file, see how far it is and what it refused, cancel."""

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path

from rollouts.admin.actions import act
from rollouts.importers.formats import FORMATS
from rollouts.models import RejectedRow, TaskImport
from rollouts.services.task_imports import begin_path, begin_upload, cancel_import
from rollouts.states import IMPORT_ACTIVE
from sandboxes.admin.actions import Skip
from sandboxes.admin.base import IndentedJSONField, ReadOnlyAdmin, list_link
from sandboxes.admin.shown import NOTHING, block


class UploadForm(forms.Form):
    """A file to send, or a path that the operator opened; and what to do with it."""

    set_name = forms.CharField(max_length=99, label="Task set")
    file = forms.FileField(
        required=False,
        help_text="JSON Lines, JSON or parquet; or a zip or tar of task folders.",
    )
    path = forms.CharField(
        required=False, help_text="Instead of a file: below one of PRORL_IMPORT_ROOTS."
    )
    format = forms.ChoiceField(
        required=False,
        choices=[("", "told by the content"), *((name, name) for name in sorted(FORMATS))],
    )
    environment = forms.CharField(
        required=False, help_text="name or name@version for all tasks; empty: one for each need."
    )
    options = IndentedJSONField(required=False, help_text="See docs/importing.md.")
    description = forms.CharField(required=False, widget=forms.Textarea(attrs={"rows": 2}))

    def clean(self) -> dict[str, Any]:
        """Refuse what is neither, or both."""
        values = super().clean() or self.cleaned_data
        if bool(values.get("file")) == bool(values.get("path")) and not self.errors:
            raise ValidationError("Give a file or a path.")
        options = values.get("options")
        if options is not None and not isinstance(options, dict):
            self.add_error("options", "It must be a JSON object.")
        return values


@admin.register(TaskImport)
class TaskImportAdmin(ReadOnlyAdmin):
    """Show imports; begin one with an upload, cancel one that runs."""

    change_list_template = "admin/rollouts/taskimport/change_list.html"
    change_form_template = "admin/rollouts/taskimport/change_form.html"
    list_display = [
        *("id", "set_name", "name", "format", "state", "created", "changed", "unchanged"),
        *("rejected", "created_at", "ended_at"),
    ]
    list_filter = ["state", "format"]
    search_fields = ["set_name"]
    search_prefixes = ("set_name",)
    fields = [
        *("id", "set_name", "task_set", "name", "source", "format", "environment", "options"),
        *("state", "progress", "created", "changed", "unchanged", "rejected", "refused"),
        *("requested_by", "attempts", "error_code", "error"),
        *("created_at", "started_at", "ended_at"),
    ]
    readonly_fields = ["progress", "refused"]
    actions = ["cancel"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[TaskImport]:
        """Return imports with what a page names."""
        found = super().get_queryset(request)
        return found.select_related("environment", "task_set", "requested_by")

    def get_urls(self) -> list[Any]:
        """Add the upload."""
        view = self.admin_site.admin_view(self.upload_view)
        return [path("upload/", view, name="rollouts_taskimport_upload"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Show the way to the upload to those who may begin imports."""
        more = {"can_upload": self.has_operate_permission(request)}
        return super().changelist_view(request, {**(extra_context or {}), **more})

    def upload_view(self, request: HttpRequest) -> HttpResponse:
        """Show the form, or queue an import."""
        if not self.has_operate_permission(request):
            raise PermissionDenied
        form = UploadForm(request.POST or None, request.FILES or None)
        if request.method == "POST" and form.is_valid():
            try:
                job = _begin(form.cleaned_data, request.user)
            except ValidationError as refused:
                form.add_error(None, refused.messages)
            else:
                messages.success(request, f"The import of {job.name} is queued.")
                return redirect("admin:rollouts_taskimport_change", job.pk)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "form": form,
            "title": "Import tasks",
        }
        return TemplateResponse(request, "admin/rollouts/taskimport/upload.html", context)

    @admin.display(description="progress")
    def progress(self, job: TaskImport) -> str:
        """Return how much of the source is done."""
        part = f", {min(100.0, 100 * job.offset / job.total):.1f} %" if job.total else ""
        return f"{job.number} rows{part}"

    @admin.display(description="refused rows")
    def refused(self, job: TaskImport) -> str:
        """Return a link to what was refused."""
        if not job.rejected:
            return NOTHING
        return list_link(RejectedRow, "rows and reasons", task_import__id__exact=job.pk)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Show the page again every other second while the import is not over."""
        job = kwargs.get("obj")
        context["is_followed"] = job is not None and job.state in IMPORT_ACTIVE
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.action(description="Cancel", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[TaskImport]) -> None:
        """Cancel imports; what they imported stays."""

        def call(job: TaskImport) -> None:
            if not cancel_import(import_id=job.pk):
                raise Skip(f"is {job.state}.")

        act(self, request, rows, verb="Cancel", call=call)


@admin.register(RejectedRow)
class RejectedRowAdmin(ReadOnlyAdmin):
    """Show what imports refused."""

    list_display = ["place", "reason", "task_import", "number"]
    list_select_related = ["task_import"]
    search_fields = ["task_import__id"]
    search_ids = ("task_import_id",)
    ordering = ["id"]
    fields = ["task_import", "number", "place", "reason", "row"]
    readonly_fields = ["row"]

    def lookup_allowed(self, lookup: str, value: str, request: Any = None) -> bool:
        """Allow the link from an import's page."""
        return lookup == "task_import__id__exact" or super().lookup_allowed(lookup, value, request)

    @admin.display(description="row")
    def row(self, row: RejectedRow) -> str:
        """Return what was read, as it stood."""
        return block(row.raw) if row.raw else NOTHING


def _begin(values: dict[str, Any], user: Any) -> TaskImport:
    given = {
        "set_name": values["set_name"],
        "requested_by": user,
        **{
            name: values[name]
            for name in ("format", "environment", "options", "description")
            if values.get(name)
        },
    }
    if values.get("file"):
        file = values["file"]
        return begin_upload(name=file.name, chunks=file.chunks(), **given)
    return begin_path(path=values["path"], **given)
