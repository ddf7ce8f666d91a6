"""Imports of tasks as operators handle them: begin, cancel, look at."""

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models.functions import Now

from rollouts.importers.formats import FORMATS
from rollouts.importers.options import InvalidOptions, ReadOptions
from rollouts.models import TaskImport
from rollouts.services.import_claim import publish_next
from rollouts.services.import_sources import (
    allowed_path,
    forget_upload,
    import_folder,
    store_upload,
)
from rollouts.services.inline import PREFIX
from rollouts.services.task_environments import refuse_taken_name
from rollouts.states import ImportSource, ImportState
from sandboxes.models import Environment, validate_name
from sandboxes.services.catalogue import find_environment

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def begin_upload(
    *, set_name: str, name: str, chunks: Iterable[bytes], requested_by: Any, **values: Any
) -> TaskImport:
    """Store an upload and queue its import; raises ValidationError, then nothing is left.

    `values` are those of `check_import`.
    """
    checked = check_import(set_name=set_name, **values)
    import_id = uuid4()
    path = store_upload(import_id=import_id, chunks=chunks)
    try:
        return _queue(
            pk=import_id,
            source=ImportSource.UPLOAD,
            name=Path(name).name[-500:] or "upload",
            path=str(path),
            requested_by=requested_by,
            **checked,
        )
    except BaseException:
        shutil.rmtree(import_folder(import_id), ignore_errors=True)
        raise


def begin_path(*, set_name: str, path: str, requested_by: Any, **values: Any) -> TaskImport:
    """Queue the import of what lies below an open folder; raises ValidationError."""
    checked = check_import(set_name=set_name, **values)
    found = allowed_path(path)
    return _queue(
        source=ImportSource.PATH,
        name=path[-500:],
        path=str(found),
        requested_by=requested_by,
        **checked,
    )


def begin_here(*, set_name: str, path: Path, **values: Any) -> TaskImport:
    """Make the import of a path for this very process to claim; raises ValidationError.

    For the command line, whose user may read what the service may read.
    """
    checked = check_import(set_name=set_name, **values)
    return TaskImport.objects.create(
        source=ImportSource.PATH,
        name=str(path)[-500:],
        path=str(path.resolve()),
        published_at=Now(),  # no worker is asked
        **checked,
    )


def check_import(
    *,
    set_name: str,
    format: str = "",
    environment: str = "",
    options: Mapping[str, Any] | None = None,
    description: str = "",
) -> dict[str, Any]:
    """Return the columns of an import with these values; raises ValidationError."""
    validate_name(set_name)
    if set_name.startswith(PREFIX):
        raise ValidationError({"set_name": f"Names that begin with {PREFIX!r} are taken."})
    if format and format not in FORMATS:
        raise ValidationError(
            {"format": f"There is no format {format!r}; known: {', '.join(FORMATS)}."}
        )
    try:
        _check_storable(options or {})
        read = ReadOptions.from_dict(options or {})
        kept = read.as_dict()
    except InvalidOptions as fault:
        raise ValidationError({"options": str(fault)}) from None
    except RecursionError:
        raise ValidationError({"options": "They are nested too deep; write them flat."}) from None
    chosen: Environment | None = find_environment(ref=environment) if environment else None
    if read.tools == "environment" and chosen is None:
        raise ValidationError({"options": "tools = environment needs an environment."})
    if chosen is None:
        refuse_taken_name(set_name=set_name)
    return {
        "set_name": set_name,
        "format": format,
        "environment": chosen,
        "options": kept,
        "description": description,
    }


def _check_storable(value: Any) -> None:
    """Refuse what `jsonb` cannot hold. Raises `InvalidOptions`, RecursionError."""
    match value:
        case str() if _UNSTORABLE.search(value):
            raise InvalidOptions("They hold a NUL or half a surrogate pair; leave it out.")
        case float() if not math.isfinite(value):
            raise InvalidOptions("They hold a number that is not finite; write a finite one.")
        case list():
            for each in value:
                _check_storable(each)
        case dict():
            for name, each in value.items():
                _check_storable(name)
                _check_storable(each)


def cancel_import(*, import_id: UUID) -> bool:
    """End an import: at once when it is queued, within seconds when it runs; False when over.

    What it imported stays. Idempotent while it runs.
    """
    queued = TaskImport.objects.filter(pk=import_id, state=ImportState.QUEUED)
    over = {"state": ImportState.CANCELLED, "cancel_requested_at": Now(), "ended_at": Now()}
    if queued.update(**over):
        forget_upload(job=TaskImport.objects.get(pk=import_id))
        return True
    running = TaskImport.objects.filter(pk=import_id, state=ImportState.RUNNING)
    return bool(running.update(cancel_requested_at=Now()))


def _queue(**columns: Any) -> TaskImport:
    with transaction.atomic():
        job = TaskImport.objects.create(**columns)
        publish_next()
    return job
