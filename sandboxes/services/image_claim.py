"""Who works on an image build: taken under a token, ended under it, or found dead."""

import logging
from dataclasses import dataclass
from uuid import UUID, uuid4

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from sandboxes.images.exceptions import ImageWorkLost
from sandboxes.models import ImageBuild
from sandboxes.querysets import ImageBuildQuerySet
from sandboxes.states import ImageBuildState

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0  # without a sign of life the worker is dead
MOST_ATTEMPTS = 3  # beginnings of one build, its worker dying each time


@dataclass(frozen=True)
class Claimed:
    """A build that this process holds until it ends it under the token."""

    build: ImageBuild
    token: UUID


def claim_build(*, build_id: UUID) -> Claimed | None:
    """Take a queued build of this node, one worker for each; None when it is not to be had.

    A node runs at most `IMAGE_BUILDS` at once: the others stay queued.
    """
    token = uuid4()
    with transaction.atomic():
        with connection.cursor() as cursor:
            lock = f"image-builds:{settings.NODE_NAME}"
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [lock])
        here = ImageBuild.objects.filter(node__name=settings.NODE_NAME)
        if here.filter(state=ImageBuildState.RUNNING).count() >= settings.IMAGE_BUILDS:
            return None
        won = here.filter(pk=build_id, state=ImageBuildState.QUEUED).update(
            state=ImageBuildState.RUNNING,
            lease_token=token,
            attempts=F("attempts") + 1,
            started_at=Now(),
            heartbeat_at=Now(),
            log="",
            log_start=0,
        )
    if not won:
        return None
    return Claimed(ImageBuild.objects.select_related("image", "node").get(pk=build_id), token)


def held_build(*, claimed: Claimed) -> ImageBuildQuerySet:
    """Keep the build while it is held under the token."""
    return ImageBuild.objects.filter(
        pk=claimed.build.pk, state=ImageBuildState.RUNNING, lease_token=claimed.token
    )


def end_build(*, claimed: Claimed, state: ImageBuildState, **values: object) -> bool:
    """End a build under its token; False when it is held no longer."""
    over = {"state": state, "lease_token": None, "ended_at": timezone.now()}
    return bool(held_build(claimed=claimed).update(**over, **values))


def recover_builds() -> int:
    """Queue again what a dead worker left, or fail it after `MOST_ATTEMPTS`; return how many.

    Also fails what no worker took within its time limit.
    """
    recovered = 0
    for build in list(ImageBuild.objects.silent(SILENT_SECONDS)):
        held = ImageBuild.objects.filter(
            pk=build.pk, state=ImageBuildState.RUNNING, lease_token=build.lease_token
        )
        if build.cancel_requested_at is not None:
            won = held.update(
                state=ImageBuildState.CANCELLED, lease_token=None, ended_at=timezone.now()
            )
        elif build.attempts < MOST_ATTEMPTS:
            won = held.update(state=ImageBuildState.QUEUED, lease_token=None, published_at=None)
        else:
            won = held.update(
                state=ImageBuildState.FAILED,
                lease_token=None,
                ended_at=timezone.now(),
                error_code=ImageWorkLost.code,
                error=f"The worker died {build.attempts} times at it.",
            )
        if won:
            logger.warning("image build %s was left by its worker", build.pk)
        recovered += won
    return recovered + _fail_untaken()


def _fail_untaken() -> int:
    failed = 0
    for build in list(ImageBuild.objects.filter(state=ImageBuildState.QUEUED, attempts=0)):
        if (timezone.now() - build.created_at).total_seconds() > build.time_limit_seconds:
            failed += ImageBuild.objects.filter(
                pk=build.pk, state=ImageBuildState.QUEUED, attempts=0
            ).update(
                state=ImageBuildState.FAILED,
                ended_at=timezone.now(),
                error_code="sandbox.image_no_worker",
                error="No worker of the node took it in time.",
            )
    return failed
