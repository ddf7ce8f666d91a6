"""Worker processes: registration, renewal, end."""

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from rollouts.models import Worker
from sandboxes.models import Node


@dataclass(frozen=True)
class Registration:
    """A registered process: the ids that its claims carry."""

    worker_id: UUID
    node_id: UUID
    node: str


def _lease_end() -> CombinedExpression:
    """Return when a lease taken now ends, by the database's clock: nodes' clocks may differ."""
    return Now() + timedelta(seconds=settings.LEASE_SECONDS)


def register_worker(*, stage: str, pid: int, concurrency: int) -> Registration:
    """Insert the row of a process, and its node's row when missing; take the first lease."""
    with transaction.atomic():
        node, _created = Node.objects.get_or_create(
            name=settings.NODE_NAME, defaults={"capacity": settings.NODE_CAPACITY}
        )
        Node.objects.filter(pk=node.pk).update(seen_at=Now())
        worker = Worker.objects.create(
            node=node,
            stage=stage,
            pid=pid,
            concurrency=concurrency,
            lease_expires_at=_lease_end(),
        )
    return Registration(worker.id, node.id, node.name)


def renew_worker(*, worker_id: UUID) -> bool:
    """Renew the lease of a process; False when it was buried: the process must stop its work."""
    renewed = Worker.objects.filter(pk=worker_id, ended_at__isnull=True).update(
        lease_expires_at=_lease_end()
    )
    if renewed:
        Node.objects.filter(workers__id=worker_id).update(seen_at=Now())
    return bool(renewed)


def end_worker(*, worker_id: UUID) -> None:
    """Say that a process ended; its running attempts are recovered at once. Idempotent."""
    from rollouts.services.reap import recover_attempts_of

    Worker.objects.filter(pk=worker_id, ended_at__isnull=True).update(
        ended_at=Now(), lease_expires_at=Now()
    )
    recover_attempts_of(worker_id=worker_id)
