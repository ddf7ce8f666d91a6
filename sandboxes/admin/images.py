"""Admin of images and of their way onto nodes."""

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ActionForm
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from sandboxes.admin.actions import Refused, Skip, carry_out
from sandboxes.admin.base import BaseAdmin, CodeWidget, ReadOnlyAdmin
from sandboxes.admin.shown import NOTHING, block, moment, object_link
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.services.images import (
    cancel_build,
    check_definition,
    define_image,
    request_builds,
    retry_build,
)
from sandboxes.states import IMAGE_BUILD_ACTIVE

LOG_SHOWN = 20_000


class NodeActionForm(ActionForm):
    """Choose the node of an action; none means every node that runs workers now."""

    node = forms.ModelChoiceField(
        Node.objects.order_by("name"),
        required=False,
        to_field_name="name",
        empty_label="all nodes",
        label="on",
    )


class ImageForm(forms.ModelForm):  # type: ignore[type-arg]
    """Check an image as the catalogue will."""

    class Meta:
        model = Image
        fields = ["name", "source", "definition", "files", "parameters", "reuse", "lock"]
        widgets = {"definition": CodeWidget}

    def clean(self) -> dict[str, Any]:
        """Refuse what no node could get."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        if not self.errors:
            self.instance.name = values.get("name", self.instance.name)
            try:
                check_definition(name=self.instance.name, **_defining(values))
            except ValidationError as refused:
                self.add_error(None, refused.messages)
        return values


@admin.register(Image)
class ImageAdmin(BaseAdmin):
    """Edit images and get them onto nodes; one that an environment uses cannot be deleted."""

    form = ImageForm
    action_form = NodeActionForm
    list_display = ["name", "source", "state", "checked_at", "created_at"]
    list_filter = ["state"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    fields = [
        *("name", "source", "definition", "files", "parameters", "reuse", "lock"),
        *("state", "detail", "digest", "checked_at", "on_nodes", "created_at"),
    ]
    readonly_fields = ["state", "detail", "digest", "checked_at", "on_nodes", "created_at"]
    actions = ["get_on_nodes", "check_on_nodes"]

    def fixed_fields(self, obj: Any) -> list[str]:
        """Fix the name once the image is there: environments are found by it."""
        return [*self.readonly_fields, *(["name"] if obj else [])]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save as the API does."""
        obj.pk = define_image(name=obj.name, **_defining(form.cleaned_data)).pk

    @admin.display(description="on nodes")
    def on_nodes(self, image: Image) -> str:
        """Return the latest build on each node."""
        latest = (
            ImageBuild.objects.filter(image=image)
            .order_by("node__name", "-created_at")
            .distinct("node__name")
            .select_related("node")
            .defer("log")
        )
        rows = [
            (build.node.name, object_link(build, f"{build.kind} {build.state}"), _when(build))
            for build in latest
        ]
        return format_html_join("", "<div>{}: {} {}</div>", rows) if rows else NOTHING

    @admin.action(description="Pull, build or unpack on nodes", permissions=["change"])
    def get_on_nodes(self, request: HttpRequest, rows: QuerySet[Image]) -> None:
        """Ask nodes to get images, once more where they have them."""
        self._request(request, rows, check_only=False)

    @admin.action(description="Check on nodes", permissions=["change"])
    def check_on_nodes(self, request: HttpRequest, rows: QuerySet[Image]) -> None:
        """Ask nodes to start a sandbox from images."""
        self._request(request, rows, check_only=True)

    def _request(self, request: HttpRequest, rows: QuerySet[Image], *, check_only: bool) -> None:
        node = request.POST.get("node", "")

        def call(image: Image) -> None:
            try:
                request_builds(
                    image=image,
                    requested_by=request.user,
                    nodes=[node] if node else None,
                    check_only=check_only,
                )
            except ValidationError as refused:
                raise Refused(" ".join(refused.messages)) from None

        verb = "Check" if check_only else "Pull or build"
        carry_out(self, request, rows, verb=f"{verb} on {node or 'all nodes'}", call=call)


@admin.register(ImageBuild)
class ImageBuildAdmin(ReadOnlyAdmin):
    """Follow builds, cancel them, ask for them again."""

    list_display = [
        *("id", "image", "node", "kind", "state", "attempts", "created_at", "ended_at"),
    ]
    list_select_related = ["image", "node"]
    list_filter = ["state", "kind", "node"]
    search_fields = ["id"]
    search_ids = ("id", "image_id")
    fields = [
        *("id", "image", "node", "kind", "state", "requested_by", "attempts"),
        *("time_limit_seconds", "digest", "image_bytes", "sif_bytes", "error_code", "error"),
        *("created_at", "started_at", "ended_at", "said"),
    ]
    readonly_fields = ["said"]
    actions = ["cancel", "retry"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ImageBuild]:
        """Return builds; their logs are read on their own pages only."""
        return ImageBuild.objects.defer("log")

    @admin.display(description="log")
    def said(self, build: ImageBuild) -> str:
        """Return the end of the log."""
        left_out = build.log_start + max(0, len(build.log) - LOG_SHOWN)
        before = f"[{left_out} characters before]\n" if left_out else ""
        return block(f"{before}{build.log[-LOG_SHOWN + 100 :]}" if build.log else "")

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Show the page again every other second while the build is not over."""
        build = kwargs.get("obj")
        context["is_followed"] = build is not None and build.state in IMAGE_BUILD_ACTIVE
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.action(description="Cancel", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[ImageBuild]) -> None:
        """Cancel builds."""

        def call(build: ImageBuild) -> None:
            if not cancel_build(build_id=build.pk):
                raise Skip(f"is {build.state}.")

        carry_out(self, request, rows, verb="Cancel", call=call)

    @admin.action(description="Ask for it again", permissions=["operate"])
    def retry(self, request: HttpRequest, rows: QuerySet[ImageBuild]) -> None:
        """Ask again for what builds were for."""

        def call(build: ImageBuild) -> None:
            if build.state in IMAGE_BUILD_ACTIVE:
                raise Skip(f"is {build.state}.")
            try:
                retry_build(build=build, requested_by=request.user)
            except ValidationError as refused:
                raise Refused(" ".join(refused.messages)) from None

        carry_out(self, request, rows, verb="Ask again", call=call)


def _defining(values: dict[str, Any]) -> dict[str, Any]:
    names = ("source", "definition", "files", "parameters", "reuse", "lock")
    return {name: values[name] for name in names if values.get(name) is not None}


def _when(build: ImageBuild) -> str:
    return moment(build.ended_at or build.started_at or build.created_at)
