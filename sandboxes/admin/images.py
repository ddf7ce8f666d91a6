"""Admin of images."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from sandboxes.admin.base import BaseAdmin
from sandboxes.models import Image
from sandboxes.services.catalogue import save_image


@admin.register(Image)
class ImageAdmin(BaseAdmin):
    """Edit images; one that an environment uses cannot be deleted."""

    list_display = ["name", "source", "state", "created_at"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    fields = ["name", "source", "state", "detail", "created_at"]
    readonly_fields = ["state", "detail", "created_at"]

    def fixed_fields(self, obj: Any) -> list[str]:
        """Fix the name once the image is there: environments are found by it."""
        return [*self.readonly_fields, *(["name"] if obj else [])]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save through the catalogue."""
        obj.pk = save_image(name=obj.name, source=obj.source).pk
