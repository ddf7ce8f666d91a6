"""Actions on the assembly line: the API's services, row by row."""

from collections.abc import Callable
from typing import Any

from django.contrib.admin import ModelAdmin
from django.db.models import QuerySet
from django.http import HttpRequest

from rollouts.exceptions import NotThere, RolloutError, StateConflict
from sandboxes.admin.actions import Refused, Skip, carry_out


def act(
    admin: "ModelAdmin[Any]",
    request: HttpRequest,
    rows: QuerySet[Any],
    *,
    verb: str,
    call: Callable[[Any], object],
) -> None:
    """Call a service for each row; a state in which it has no meaning counts as skipped."""

    def one(row: Any) -> None:
        try:
            call(row)
        except (StateConflict, NotThere) as reason:
            raise Skip(str(reason)) from reason
        except RolloutError as reason:
            raise Refused(str(reason)) from reason

    carry_out(admin, request, rows, verb=verb, call=one)
