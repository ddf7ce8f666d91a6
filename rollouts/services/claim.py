"""Claiming an attempt: the lease that every later write needs."""

import uuid
from dataclasses import dataclass
from uuid import UUID

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce, Now

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt
from rollouts.services.workers import Registration
from rollouts.states import AttemptState


@dataclass(frozen=True)
class Claim:
    """A held attempt."""

    attempt_id: UUID
    rollout_id: UUID
    stage: str
    token: UUID
    node_id: UUID
    budget_seconds: float


def claim_attempt(*, attempt_id: UUID, worker: Registration) -> Claim | None:
    """Take a queued attempt for a worker process; None when another has it or it has ended.

    The attempt is counted by its start time before any work is done.
    """
    token = uuid.uuid4()
    with transaction.atomic():
        # No join here: Django would turn it into `id IN (SELECT …)`, whose answer PostgreSQL does
        # not take again after waiting for a row lock, and two workers would win.
        won = Attempt.objects.filter(pk=attempt_id, state=AttemptState.QUEUED).update(
            state=AttemptState.RUNNING,
            lease_token=token,
            worker_id=worker.worker_id,
            node_id=Coalesce(F("node_id"), worker.node_id),
            started_at=Now(),
        )
        if not won:
            return None
        attempt = Attempt.objects.only("rollout_id", "stage", "budget_seconds").get(pk=attempt_id)
    return Claim(
        attempt_id,
        attempt.rollout_id,
        attempt.stage,
        token,
        worker.node_id,
        attempt.budget_seconds,
    )


def ensure_held(*, claim: Claim) -> None:
    """Raise LeaseLost unless the claim is still the caller's: before it touches a sandbox."""
    held = Attempt.objects.filter(
        pk=claim.attempt_id, lease_token=claim.token, state=AttemptState.RUNNING
    )
    if not held.exists():
        raise LeaseLost(f"attempt {claim.attempt_id} is held no longer")
