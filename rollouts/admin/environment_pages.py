"""Pages of the catalogue beside Django's own: an environment as a file, and version by version."""

from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.utils.text import get_valid_filename

from rollouts.exceptions import RolloutError
from rollouts.services.environment_files import (
    MAX_TOML_BYTES,
    diff_environments,
    export_environment,
    import_environment,
)
from sandboxes.admin.shown import plain
from sandboxes.models import Environment

MAX_VERSIONS = 200


class ImportForm(forms.Form):
    """One TOML file."""

    file = forms.FileField(help_text="An environment as the export writes it.")

    def clean_file(self) -> str:
        """Return the text."""
        given = self.cleaned_data["file"]
        if given.size > MAX_TOML_BYTES:
            raise forms.ValidationError(f"It has more than {MAX_TOML_BYTES} bytes.")
        try:
            text: str = given.read().decode()
        except UnicodeDecodeError:
            raise forms.ValidationError("It is no text in UTF-8.") from None
        return text


def export_page(admin: "ModelAdmin[Any]", request: HttpRequest, pk: UUID) -> HttpResponse:
    """Return a version as a file to keep."""
    environment = _visible(admin, request, pk)
    name = get_valid_filename(f"{environment.name}-{environment.version}.toml")
    return HttpResponse(
        export_environment(environment=environment),
        content_type="application/toml; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def import_page(admin: "ModelAdmin[Any]", request: HttpRequest) -> HttpResponse:
    """Show the form, or make the version that its file describes."""
    if not admin.has_add_permission(request):
        raise PermissionDenied
    form = ImportForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid():
        try:
            environment = import_environment(text=form.cleaned_data["file"])
        except RolloutError as refused:
            form.add_error("file", plain(str(refused)))
        else:
            messages.success(request, f"{environment.ref} is what the file describes.")
            return redirect("admin:sandboxes_environment_change", environment.pk)
    page = {
        **admin.admin_site.each_context(request),
        "title": "Import an environment",
        "opts": admin.opts,
        "form": form,
    }
    return TemplateResponse(request, "admin/sandboxes/environment/import.html", page)


def diff_page(admin: "ModelAdmin[Any]", request: HttpRequest, pk: UUID) -> HttpResponse:
    """Show what differs from the version that is asked for, or from the one before."""
    after = _visible(admin, request, pk)
    others = Environment.objects.filter(name=after.name).exclude(pk=after.pk)
    versions = list(others.select_related("image").order_by("-version")[:MAX_VERSIONS])
    wanted = request.GET.get("against", "")
    chosen = next((each for each in versions if str(each.pk) == wanted), None)
    if chosen is None:
        chosen = next((each for each in versions if each.version < after.version), None)
    before = chosen or next(iter(versions), None)
    page: dict[str, Any] = {
        **admin.admin_site.each_context(request),
        "title": f"What {after.ref} changed" if before else f"{after.ref} is the only version",
        "opts": admin.opts,
        "environment": after,
        "before": before,
        "versions": versions,
    }
    if before is not None:
        page["differences"] = [
            (each.name, [(kind, plain(text)) for kind, text in each.lines])
            for each in diff_environments(before=before, after=after)
        ]
    return TemplateResponse(request, "admin/sandboxes/environment/diff.html", page)


def _visible(admin: "ModelAdmin[Any]", request: HttpRequest, pk: UUID) -> Environment:
    environment = get_object_or_404(Environment.objects.select_related("image"), pk=pk)
    if not admin.has_view_permission(request, environment):
        raise PermissionDenied
    return environment
