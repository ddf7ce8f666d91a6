"""Claiming an attempt: the lease that every later write needs."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Coalesce, Now

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, JournalEntry, PolicyUpdate
from rollouts.services.workers import Registration
from rollouts.states import AttemptState, Stage, UpdateMode


@dataclass(frozen=True)
class Claim:
    """A held attempt."""

    attempt_id: UUID
    rollout_id: UUID
    stage: str
    token: UUID
    node_id: UUID
    budget_seconds: float


# Only what is not as it was is told: of hundreds held, that is none in most rounds.
_CHANGED = """
SELECT held.id, attempt.id IS NULL
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS held (id, token)
LEFT JOIN rollouts_attempt AS attempt
    ON attempt.id = held.id AND attempt.lease_token = held.token AND attempt.state = %(running)s
LEFT JOIN rollouts_rollout AS rollout ON rollout.id = attempt.rollout_id
WHERE attempt.id IS NULL OR rollout.cancel_requested_at IS NOT NULL
"""


def changed_claims(*, claims: Sequence[Claim]) -> dict[UUID, bool]:
    """Return the attempts that are held no longer (True) or whose rollout is cancelled (False)."""
    values: dict[str, Any] = {
        "ids": [claim.attempt_id for claim in claims],
        "tokens": [claim.token for claim in claims],
        "running": AttemptState.RUNNING.value,
    }
    with connection.cursor() as cursor:
        cursor.execute(_CHANGED, values)
        found: list[tuple[UUID, bool]] = cursor.fetchall()
    return dict(found)


def claim_attempt(*, attempt_id: UUID, worker: Registration) -> Claim | None:
    """Take a queued attempt for a worker process; None when another has it or it has ended.

    The attempt is counted by its start time before any work is done.
    """
    token = uuid.uuid4()
    try:
        return _claim(attempt_id, worker, token)
    except _HeldBack:
        return None


class _HeldBack(Exception):
    """An update of the policy waits until no rollout runs; the attempt is published after it."""


def _claim(attempt_id: UUID, worker: Registration, token: UUID) -> Claim | None:
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
        if attempt.stage == Stage.RUN and _held_back(attempt.rollout_id):
            raise _HeldBack
    return Claim(
        attempt_id,
        attempt.rollout_id,
        attempt.stage,
        token,
        worker.node_id,
        attempt.budget_seconds,
    )


# The shared lock makes a beginning update wait for this claim, and this claim see the update.
_LOCK_POLICY = """
SELECT policy.id FROM rollouts_policy AS policy
JOIN rollouts_experiment AS experiment ON experiment.policy_id = policy.id
JOIN rollouts_rollout AS rollout ON rollout.experiment_id = experiment.id
WHERE rollout.id = %s FOR SHARE OF policy
"""


def _held_back(rollout_id: UUID) -> bool:
    """Tell whether a rollout that has not begun RUN must wait for an update of its policy."""
    with connection.cursor() as cursor:
        cursor.execute(_LOCK_POLICY, [rollout_id])
        row = cursor.fetchone()
    if row is None:
        return False
    drains = PolicyUpdate.objects.open().filter(policy_id=row[0], mode=UpdateMode.DRAIN_ROLLOUTS)
    begun = JournalEntry.objects.filter(rollout_id=rollout_id, restarts=F("rollout__restarts"))
    return drains.exists() and not begun.exists()


def ensure_held(*, claim: Claim) -> None:
    """Raise LeaseLost unless the claim is still the caller's: before it touches a sandbox."""
    held = Attempt.objects.filter(
        pk=claim.attempt_id, lease_token=claim.token, state=AttemptState.RUNNING
    )
    if not held.exists():
        raise LeaseLost(f"attempt {claim.attempt_id} is held no longer")
