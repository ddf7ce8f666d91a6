"""Snapshots: asked for, taken after a turn, started from, deleted."""

import logging
from collections.abc import Collection
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from sandboxes.models import Environment, Node, Sandbox, Snapshot
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from sandboxes.services.connections import release_connection
from sandboxes.states import SnapshotState

logger = logging.getLogger(__name__)

MAX_PER_OWNER = 64


def request_snapshot(*, owner: UUID, environment: Environment, turn: int | None) -> Snapshot:
    """Ask for the state after `turn` turns, or after the next one. Raises ValidationError."""
    with transaction.atomic():
        mine = Snapshot.objects.filter(owner=owner).exclude(state=SnapshotState.FAILED)
        if mine.count() >= MAX_PER_OWNER:
            raise ValidationError(f"A rollout has at most {MAX_PER_OWNER} snapshots.")
        return Snapshot.objects.create(owner=owner, environment=environment, turn=turn)


def take_due_snapshots(
    *, sandbox: Sandbox, runtime: Runtime, handle: SandboxHandle, turn: int, workdir: str
) -> int:
    """Take what is due from a sandbox after that turn; return how many were taken.

    A copy that fails is written down as such, and the episode goes on.
    """
    due = list(Snapshot.objects.due(sandbox.owner, turn))
    release_connection()
    return sum(_take(snapshot, sandbox, runtime, handle, turn, workdir) for snapshot in due)


def _take(
    snapshot: Snapshot,
    sandbox: Sandbox,
    runtime: Runtime,
    handle: SandboxHandle,
    turn: int,
    workdir: str,
) -> int:
    asked = Snapshot.objects.filter(pk=snapshot.pk, state=SnapshotState.REQUESTED)
    try:
        layer = runtime.snapshot(handle)
    except SandboxFault as fault:
        logger.warning("snapshot %s could not be taken: %s", snapshot.pk, fault)
        asked.update(state=SnapshotState.FAILED, detail=f"{fault.code}: {fault}"[:4000])
        return 0
    won = asked.update(
        state=SnapshotState.READY,
        node=Node.objects.get(name=settings.NODE_NAME),
        layers=[layer, *sandbox.layers],
        turn=turn,
        workdir=workdir[:4096],
        ready_at=timezone.now(),
    )
    release_connection()
    if not won:
        runtime.discard_layer(layer)
    return won


def fail_requested(*, owners: Collection[UUID], detail: str) -> int:
    """Say that what was asked for will not come: the episodes are over."""
    return Snapshot.objects.filter(owner__in=owners, state=SnapshotState.REQUESTED).update(
        state=SnapshotState.FAILED, detail=detail
    )
