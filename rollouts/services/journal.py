"""The journal: each finished step of an episode, written before the next begins."""

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import F

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, JournalEntry, Rollout
from rollouts.services.claim import Claim
from rollouts.states import AttemptState


@dataclass(frozen=True)
class Step:
    """One journaled step: what was sampled in a turn, or what was observed after it."""

    turn: int
    kind: str
    body: dict[str, Any]


def append_step(*, claim: Claim, step: Step) -> None:
    """Write one step under the lease. Raises LeaseLost when the attempt is held no longer."""
    with transaction.atomic():
        held = (
            Attempt.objects.select_for_update(of=("self",))
            .filter(pk=claim.attempt_id, lease_token=claim.token, state=AttemptState.RUNNING)
            .values_list("rollout__restarts", flat=True)
            .first()
        )
        if held is None:
            raise LeaseLost(f"attempt {claim.attempt_id} is held no longer")
        JournalEntry.objects.create(
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt_id,
            restarts=held,
            turn=step.turn,
            kind=step.kind,
            body=step.body,
        )
        if step.kind == "sampled":
            Rollout.objects.filter(pk=claim.rollout_id).update(
                turns=step.turn + 1,
                sampled_tokens=F("sampled_tokens") + len(step.body.get("token_ids", [])),
            )


def read_steps(*, claim: Claim) -> list[Step]:
    """Return the steps of the rollout's present episode in order."""
    entries = JournalEntry.objects.filter(
        rollout_id=claim.rollout_id, restarts=F("rollout__restarts")
    )
    return [Step(entry.turn, entry.kind, entry.body) for entry in entries.order_by("id")]
