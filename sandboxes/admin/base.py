"""What every admin page shares: bounded lists, read-only pages, narrow writes, links."""

import json
from collections.abc import Sequence
from string import hexdigits
from typing import Any, ClassVar
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget
from django.core.paginator import Paginator
from django.db.models import JSONField, Model, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString

from sandboxes.admin.shown import SHORT_ID, columns, detail, object_link

__all__ = ["BaseAdmin", "ReadOnlyAdmin", "ReadOnlyInline", "list_link", "object_link"]

LIST_LIMIT = 10_000


class CodeWidget(AdminTextareaWidget):
    """A wide text area in which columns line up."""

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        super().__init__({"class": "vLargeTextField code", "spellcheck": "false", **(attrs or {})})


class IndentedJSONField(forms.JSONField):
    """A JSON value on as many lines as it has entries."""

    widget = CodeWidget

    def prepare_value(self, value: Any) -> Any:
        """Return the value indented; what was typed and is no JSON stays as it was."""
        shown = super().prepare_value(value)
        try:
            return json.dumps(json.loads(shown), indent=2, ensure_ascii=False)
        except (TypeError, ValueError):
            return shown


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Count at most `LIST_LIMIT` rows: a list of millions is never counted."""

    @cached_property
    def count(self) -> int:
        """Return the number of rows that can be paged through."""
        rows: Any = self.object_list
        return int(rows[:LIST_LIMIT].count())


class BaseAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """List without full counts and search only what an index answers.

    `search_ids` are columns compared with a UUID or, from eight digits on, with the beginning of
    one; `search_prefixes` are columns whose beginning is compared. Set `search_fields` too, which
    shows the box.
    """

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 200
    formfield_overrides = {JSONField: {"form_class": IndentedJSONField, "widget": CodeWidget}}
    search_ids: ClassVar[Sequence[str]] = ("id",)
    search_prefixes: ClassVar[Sequence[str]] = ()

    class Media:
        css = {"all": ["sandboxes/admin.css"]}

    def fixed_fields(self, obj: Any) -> list[str]:
        """Return the names that are shown and not edited; `obj` is None for a new row."""
        return list(self.readonly_fields)

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Show ids short, times to the second, and other rows as links."""
        return columns(self.model, super().get_list_display(request), first_is_link=True)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return the fixed fields, by name and as they are shown."""
        names = self.fixed_fields(obj)
        return [*names, *(detail(self.model, name) for name in names)]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Show what is not edited: times to the second, JSON indented, texts inert.

        A row that is not there yet has only what is asked for.
        """
        fixed: Any = self.get_readonly_fields(request, obj)
        fieldsets = super().get_fieldsets(request, obj)
        if obj is None:
            asked = [
                (title, {**options, "fields": [n for n in options["fields"] if n not in fixed]})
                for title, options in fieldsets
            ]
            return [fieldset for fieldset in asked if fieldset[1]["fields"]]
        readable = not self.has_change_permission(request, obj)
        return [
            (
                title,
                {
                    **options,
                    "fields": [
                        detail(self.model, name) if readable or name in fixed else name
                        for name in options["fields"]
                    ],
                },
            )
            for title, options in fieldsets
        ]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows whose id or prefix fits the text."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q()
        bounds = _id_bounds(term)
        if bounds is not None:
            for name in self.search_ids:
                wanted |= Q(**{f"{name}__gte": bounds[0], f"{name}__lte": bounds[1]})
        for name in self.search_prefixes:
            wanted |= Q(**{f"{name}__startswith": term})
        return (queryset.filter(wanted) if wanted else queryset.none()), False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Write only what the form changed, so that what workers write meanwhile stays."""
        if not change:
            obj.save(force_insert=True)
            return
        concrete = {field.name for field in obj._meta.concrete_fields}
        changed = [name for name in form.changed_data if name in concrete]
        if changed:
            obj.save(update_fields=changed)


class ReadOnlyAdmin(BaseAdmin):
    """Show what workers and trainers write; nothing is added, changed or deleted here."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Allow actions to those who may change the model's rows."""
        name = f"{self.opts.app_label}.change_{self.opts.model_name}"
        return bool(getattr(request.user, "has_perm")(name))  # noqa: B009


class ReadOnlyInline(admin.TabularInline):  # type: ignore[type-arg]
    """Show related rows that nobody edits here."""

    extra = 0
    can_delete = False
    show_change_link = True

    class Media:
        css = {"all": ["sandboxes/admin.css"]}

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Show times to the second, JSON indented, and other rows as links."""
        return columns(self.model, self.fields or (), first_is_link=False)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Make every field that is shown read-only."""
        return self.get_fields(request, obj)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False


def _id_bounds(term: str) -> tuple[UUID, UUID] | None:
    """Return the first and the last id that begin with a text; None when it begins none."""
    digits = term.replace("-", "")
    if not SHORT_ID <= len(digits) <= 32 or not set(digits) <= set(hexdigits):
        return None
    return UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))


def list_link(model: type[Model], text: object, **lookups: object) -> SafeString:
    """Return a link to the admin list of a model, filtered by `lookups`."""
    meta = model._meta
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist")
    return format_html('<a href="{}?{}">{}</a>', address, urlencode(lookups), text)
