"""Who works on an import of tasks: taken under a token, ended under it, or found dead."""

import logging
from dataclasses import dataclass
from uuid import UUID, uuid4

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now

from rollouts.models import TaskImport
from rollouts.querysets import TaskImportQuerySet
from rollouts.services.import_sources import forget_upload, sweep_uploads
from rollouts.services.messages import publish_import
from rollouts.states import ImportState

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # without a sign of life the process is dead
MOST_ATTEMPTS = 3  # beginnings at one place, the process dying each time
MOST_AT_ONCE = 1  # imports into one service: each keeps a processor busy
LOST = "import.process_lost"


@dataclass(frozen=True)
class ClaimedImport:
    """An import that this process holds until it ends it under the token."""

    job: TaskImport
    token: UUID


def claim_import(*, import_id: UUID, limited: bool = True) -> ClaimedImport | None:
    """Take a queued import; None when it is not to be had, or enough are at work (`limited`)."""
    token = uuid4()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('task-imports'))")
        running = TaskImport.objects.filter(state=ImportState.RUNNING)
        if limited and running.count() >= MOST_AT_ONCE:
            return None
        won = TaskImport.objects.filter(pk=import_id, state=ImportState.QUEUED).update(
            state=ImportState.RUNNING,
            lease_token=token,
            attempts=F("attempts") + 1,
            started_at=Now(),
            heartbeat_at=Now(),
        )
    if not won:
        return None
    found = TaskImport.objects.select_related("environment", "task_set")
    return ClaimedImport(found.get(pk=import_id), token)


def held_import(*, claimed: ClaimedImport) -> TaskImportQuerySet:
    """Keep the import while it is held under the token."""
    return TaskImport.objects.filter(
        pk=claimed.job.pk, state=ImportState.RUNNING, lease_token=claimed.token
    )


def beat(*, claimed: ClaimedImport) -> bool:
    """Show life; False when the import is to end: cancelled, or held no longer."""
    held = held_import(claimed=claimed)
    return bool(held.filter(cancel_requested_at=None).update(heartbeat_at=Now()))


def end_import(*, claimed: ClaimedImport, state: ImportState, **values: object) -> bool:
    """End an import under its token; False when it is held no longer."""
    over = {"state": state, "lease_token": None, "ended_at": Now()}
    won = bool(held_import(claimed=claimed).update(**over, **values))
    if won:
        publish_next()
    return won


def give_back(*, claimed: ClaimedImport) -> None:
    """Leave an import to be gone on with by another process."""
    held_import(claimed=claimed).update(
        state=ImportState.QUEUED,
        lease_token=None,
        published_at=None,
        attempts=F("attempts") - 1,
    )


def recover_imports() -> int:
    """Queue again what a dead process left, or fail it; publish what waits. Return how many.

    An import that goes on from a place beyond its last one has all its attempts anew. What was
    uploaded for one that ends here is deleted, as are old uploads that no import is to read.
    """
    recovered = 0
    for job in TaskImport.objects.silent(SILENT_SECONDS):
        held = TaskImport.objects.filter(
            pk=job.pk, state=ImportState.RUNNING, lease_token=job.lease_token
        )
        over = {"lease_token": None, "ended_at": Now()}
        if job.cancel_requested_at is not None:
            won = held.update(state=ImportState.CANCELLED, **over)
        elif job.attempts < MOST_ATTEMPTS:
            won = held.update(state=ImportState.QUEUED, lease_token=None, published_at=None)
        else:
            error = f"The process died {job.attempts} times at row {job.number + 1}."
            won = held.update(state=ImportState.FAILED, error_code=LOST, error=error, **over)
        if won:
            logger.warning("import %s was left by its process", job.pk)
            forget_upload(job=job)
        recovered += won
    sweep_uploads()
    publish_next()
    return recovered


def publish_next() -> None:
    """Publish the imports that wait, oldest first; any number of processes may do it."""
    for job in TaskImport.objects.waiting(settings.REPUBLISH_SECONDS).order_by("created_at")[:10]:
        with transaction.atomic():
            won = TaskImport.objects.filter(
                pk=job.pk, state=ImportState.QUEUED, published_at=job.published_at
            ).update(published_at=Now())
            if won:
                publish_import(import_id=job.pk)
