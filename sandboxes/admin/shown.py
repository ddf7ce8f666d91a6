"""How values look on admin pages: short ids, times with seconds, texts that cannot act."""

import json
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

NOTHING = "-"
MAX_CHARACTERS = 20_000
MAX_LINE = 200
SHORT_ID = 8
# A list of numbers over several lines; no JSON string holds a line feed that is not written out.
NUMBERS = re.compile(r"\[\n([-+.,0-9eE\s]+)\n *\]")


def plain(text: str) -> str:
    """Return text in which control and direction characters are written out as `\\x1b`.

    Line feeds and tabs stay. Terminal escapes, right-to-left overrides and zero-width characters
    could otherwise make a page say what the agent did not.
    """
    return "\n".join(
        line if line.isprintable() else "".join(map(_written, line)) for line in text.split("\n")
    )


def _written(letter: str) -> str:
    """Return a letter, or its escape: printable is what is neither Other nor a line separator."""
    if letter.isprintable() or letter == "\t" or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()


def cut(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return text made plain, at most `limit` characters; it says how many are left out."""
    left = len(text) - limit
    return f"{plain(text[:limit])}\n[{left} more characters]" if left > 0 else plain(text)


def block(text: str | None) -> SafeString | str:
    """Return a text in lines as they are; a dash when there is none."""
    return format_html('<pre class="shown">{}</pre>', cut(text)) if text else NOTHING


def line(text: str | None) -> str:
    """Return the beginning of a text; a dash when there is none."""
    return plain(textwrap.shorten(text, MAX_LINE, placeholder=" …")) if text else NOTHING


def pretty(value: Any) -> SafeString | str:
    """Return a JSON value indented, numbers in a row; a dash when it is empty."""
    if value is None or value in ({}, [], ""):
        return NOTHING
    text = json.dumps(value, indent=2, ensure_ascii=False, cls=DjangoJSONEncoder)
    return block(NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text))


def moment(value: datetime | None) -> SafeString | str:
    """Return a time to the second in the service's time zone; a dash when there is none."""
    if value is None:
        return NOTHING
    local = timezone.localtime(value)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        local.isoformat(),
        local.tzname() or "",
        f"{local:%Y-%m-%d %H:%M:%S}",
    )


def short_id(value: UUID | None) -> SafeString | str:
    """Return the beginning of an id, which the search finds; the whole is its tooltip."""
    if value is None:
        return NOTHING
    return format_html('<code title="{}">{}</code>', value, str(value)[:SHORT_ID])


def object_link(row: models.Model | None, text: object = None) -> SafeString | str:
    """Return a link to the admin page of a row; a dash when there is none.

    A row that is known by its id alone is shown by the beginning of it.
    """
    if row is None:
        return NOTHING
    if text is None:
        text = short_id(row.pk) if str(row) == str(row.pk) else plain(str(row))
    meta = row._meta
    if not admin.site.is_registered(type(row)):
        return str(text)
    address = reverse(f"admin:{meta.app_label}_{meta.model_name}_change", args=[row.pk])
    return format_html('<a href="{}">{}</a>', address, text)


def columns(model: Any, names: Iterable[Any], *, first_is_link: bool) -> list[Any]:
    """Return what a list shows for each name; the first column, already a link, holds none."""
    return [
        _column(model, name, links=not (first_is_link and place == 0))
        for place, name in enumerate(names)
    ]


def _column(model: Any, name: Any, *, links: bool) -> Any:
    field = _field(model, name)
    if isinstance(field, models.DateTimeField):
        return _presenter(field, moment)
    if isinstance(field, models.UUIDField):
        return _presenter(field, short_id)
    if isinstance(field, models.JSONField):
        return _presenter(field, pretty)
    if isinstance(field, models.TextField):
        return _presenter(field, line)
    if isinstance(field, models.ForeignKey) and links:
        return _presenter(field, object_link)
    return name


def detail(model: Any, name: Any) -> Any:
    """Return what a page shows, and nobody edits there, for a name."""
    field = _field(model, name)
    if isinstance(field, models.DateTimeField):
        return _presenter(field, moment)
    if isinstance(field, models.JSONField):
        return _presenter(field, pretty)
    if isinstance(field, models.TextField):
        return _presenter(field, block)
    return name


def _field(model: Any, name: Any) -> Any:
    """Return the model's own field of that name, or None."""
    return next((field for field in model._meta.concrete_fields if field.name == name), None)


@cache
def _presenter(field: Any, show: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a function that the admin calls with a row, labelled and sorted as the field is."""

    def shown(row: Any) -> object:
        return show(getattr(row, field.name))

    shown.__name__ = field.name
    shown.short_description = field.verbose_name  # type: ignore[attr-defined]
    shown.admin_order_field = field.name  # type: ignore[attr-defined]
    return shown
