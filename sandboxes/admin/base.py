"""What every admin page shares: bounded lists, read-only pages, narrow writes, links."""

from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString

LIST_LIMIT = 10_000


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Count at most `LIST_LIMIT` rows: a list of millions is never counted."""

    @cached_property
    def count(self) -> int:
        """Return the number of rows that can be paged through."""
        rows: Any = self.object_list
        return int(rows[:LIST_LIMIT].count())


class BaseAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """List without full counts and search only what an index answers.

    `search_ids` are columns compared with a UUID, `search_prefixes` columns whose beginning is
    compared; set `search_fields` too, which shows the box.
    """

    paginator = BoundedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 200
    search_ids: ClassVar[Sequence[str]] = ("id",)
    search_prefixes: ClassVar[Sequence[str]] = ()

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows whose id or prefix fits the text."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q()
        try:
            number = UUID(term)
        except ValueError:
            number = None
        if number is not None:
            for name in self.search_ids:
                wanted |= Q(**{name: number})
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

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Make every field that is shown read-only."""
        return list(self.fields or ())

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse."""
        return False


def object_link(row: Model | None, text: object = None) -> SafeString | str:
    """Return a link to the admin page of a row; a dash when there is none."""
    if row is None:
        return "-"
    meta = row._meta
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[row.pk])
    return format_html('<a href="{}">{}</a>', address, row if text is None else text)


def list_link(model: type[Model], text: object, **lookups: object) -> SafeString:
    """Return a link to the admin list of a model, filtered by `lookups`."""
    meta = model._meta
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_changelist")
    return format_html('<a href="{}?{}">{}</a>', address, urlencode(lookups), text)
