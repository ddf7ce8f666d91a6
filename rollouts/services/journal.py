"""The journal: each finished step of an episode, written before the next begins."""

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import F, Subquery

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, JournalEntry, Rollout
from rollouts.services.attempts import lock_rollout
from rollouts.services.claim import Claim
from rollouts.states import AttemptState, Stage
from rollouts.text import clean_json


@dataclass(frozen=True)
class Step:
    """One journaled step: what was sampled in a turn, or what was observed after it."""

    turn: int
    kind: str
    body: dict[str, Any]


def append_step(*, claim: Claim, step: Step) -> None:
    """Write one step under the lease. Raises LeaseLost when the attempt is held no longer."""
    with transaction.atomic():
        lock_rollout(rollout_id=claim.rollout_id)
        held = Attempt.objects.filter(
            pk=claim.attempt_id, lease_token=claim.token, state=AttemptState.RUNNING
        )
        if not held.exists():
            raise LeaseLost(f"attempt {claim.attempt_id} is held no longer")
        restarts = Rollout.objects.values_list("restarts", flat=True).get(pk=claim.rollout_id)
        JournalEntry.objects.create(
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt_id,
            restarts=restarts,
            turn=step.turn,
            kind=step.kind,
            body=clean_json(step.body),
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


def run_seconds(*, claim: Claim) -> float:
    """Return the seconds that earlier workers spent on the present episode's RUN.

    The episode began with the rollout's latest INIT attempt.
    """
    attempts = Attempt.objects.filter(rollout_id=claim.rollout_id)
    begun = attempts.filter(stage=Stage.INIT).order_by("-created_at").values("created_at")[:1]
    earlier = attempts.filter(
        stage=Stage.RUN,
        created_at__gte=Subquery(begun),
        started_at__isnull=False,
        ended_at__isnull=False,
    )
    return sum(
        (ended - started).total_seconds()
        for started, ended in earlier.values_list("started_at", "ended_at")
        if started is not None and ended is not None
    )
