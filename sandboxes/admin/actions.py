"""Carry out an action row by row and say how many were done, skipped and failed."""

import logging
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.db import DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest

logger = logging.getLogger(__name__)

ROW_LIMIT = 2000
REASONS_SHOWN = 3


class Skip(Exception):
    """A row for which the action has no meaning; the message says why."""


class Refused(Exception):
    """A row for which the action failed; the message says why."""


def carry_out(
    admin: "ModelAdmin[Any]",
    request: HttpRequest,
    rows: QuerySet[Any],
    *,
    verb: str,
    call: Callable[[Any], object],
) -> None:
    """Call a service for each row, at most `ROW_LIMIT`, and tell what came of it.

    `call` raises Skip or Refused for a row that it leaves as it is; each row stands alone.
    """
    done = skipped = failed = 0
    reasons: list[str] = []
    found = list(rows[: ROW_LIMIT + 1])
    for row in found[:ROW_LIMIT]:
        try:
            call(row)
        except Skip as reason:
            skipped += 1
            reasons.append(f"{row}: {reason}")
        except Refused as reason:
            failed += 1
            reasons.append(f"{row}: {reason}")
        except DatabaseError:
            logger.exception("%s failed for %r", verb, row.pk)
            failed += 1
            reasons.append(f"{row}: the database refused; see the log")
        else:
            done += 1
    text = f"{verb}: {done} done, {skipped} skipped, {failed} failed."
    if len(found) > ROW_LIMIT:
        text += f" Only the first {ROW_LIMIT} were taken; run the action again for the rest."
    if reasons:
        text += " " + " ".join(reasons[:REASONS_SHOWN])
    if len(reasons) > REASONS_SHOWN:
        text += f" (and {len(reasons) - REASONS_SHOWN} more)"
    level = messages.ERROR if failed else messages.WARNING if skipped else messages.SUCCESS
    admin.message_user(request, text, level)
