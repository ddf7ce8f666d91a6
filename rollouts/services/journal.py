"""The journal: each finished step of an episode, written before the next begins."""

from dataclasses import dataclass
from typing import Any

import msgspec
from django.db import connection
from django.db.models import F, Subquery
from psycopg.types.json import Jsonb

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, JournalEntry, Rollout
from rollouts.services.claim import Claim
from rollouts.services.policy_updates import held_seconds
from rollouts.states import AttemptState, Stage
from rollouts.text import clean_json
from sandboxes.states import SnapshotState


@dataclass(frozen=True)
class Step:
    """One journaled step: what was sampled in a turn, or what was observed after it."""

    turn: int
    kind: str
    body: dict[str, Any]


# Locks the rollout's row before the attempt's, as every transition does, and both, so that they are
# judged as they are once the locks are had, not as they were when the statement began.
_APPEND = """
WITH held AS (
    SELECT rollout.id, rollout.restarts
    FROM rollouts_rollout AS rollout
    JOIN rollouts_attempt AS attempt ON attempt.rollout_id = rollout.id
    WHERE rollout.id = %(rollout)s AND attempt.id = %(attempt)s
      AND attempt.lease_token = %(token)s AND attempt.state = %(running)s
    FOR UPDATE OF rollout, attempt
), appended AS (
    INSERT INTO rollouts_journalentry
        (rollout_id, attempt_id, restarts, turn, kind, body, created_at)
    SELECT id, %(attempt)s, restarts, %(turn)s, %(kind)s, %(body)s, clock_timestamp() FROM held
    RETURNING id
), counted AS (
    UPDATE rollouts_rollout AS rollout
    SET turns = %(turn)s + 1, sampled_tokens = rollout.sampled_tokens + %(tokens)s
    FROM held WHERE rollout.id = held.id AND %(kind)s = 'sampled'
)
SELECT count(*) FROM appended;
"""
# A statement of its own, in the same round trip and transaction: it begins once the rollout is
# locked, so that it sees what was asked for under that lock meanwhile.
_DUE = """
SELECT count(*) FROM sandboxes_snapshot
WHERE owner = %(rollout)s AND state = %(requested)s AND (turn IS NULL OR turn = %(turn)s + 1)
"""


def append_step(*, claim: Claim, step: Step) -> bool:
    """Write one step under the lease; tell whether a snapshot is to be taken after it.

    Plain SQL: it runs twice a turn for each of hundreds of rollouts in one process. Raises
    LeaseLost when the attempt is held no longer.
    """
    values: dict[str, Any] = {
        "rollout": claim.rollout_id,
        "attempt": claim.attempt_id,
        "token": claim.token,
        "running": AttemptState.RUNNING.value,
        "requested": SnapshotState.REQUESTED.value,
        "turn": step.turn,
        "kind": step.kind,
        "body": Jsonb(clean_json(step.body), dumps=msgspec.json.encode),
        "tokens": len(step.body.get("token_ids", ())),
    }
    ends_turn = step.kind == "observed"
    with connection.cursor() as cursor:
        cursor.execute(f"{_APPEND}{_DUE}" if ends_turn else _APPEND, values)
        if not cursor.fetchone()[0]:
            raise LeaseLost(f"attempt {claim.attempt_id} is held no longer")
        return ends_turn and bool(cursor.nextset() and cursor.fetchone()[0])


def read_steps(*, claim: Claim) -> list[Step]:
    """Return the steps of the rollout's present episode in order."""
    entries = JournalEntry.objects.filter(
        rollout_id=claim.rollout_id, restarts=F("rollout__restarts")
    )
    return [Step(entry.turn, entry.kind, entry.body) for entry in entries.order_by("id")]


def run_seconds(*, claim: Claim) -> float:
    """Return the seconds that earlier workers spent on the present episode's RUN.

    Those in which an update held back the policy's generation are left out. The episode began
    with the rollout's latest INIT attempt.
    """
    attempts = Attempt.objects.filter(rollout_id=claim.rollout_id)
    begun = attempts.filter(stage=Stage.INIT).order_by("-created_at").values("created_at")[:1]
    earlier = attempts.filter(
        stage=Stage.RUN,
        created_at__gte=Subquery(begun),
        started_at__isnull=False,
        ended_at__isnull=False,
    )
    policy_id = Rollout.objects.values_list("experiment__policy_id", flat=True).get(
        pk=claim.rollout_id
    )
    return sum(
        (ended - started).total_seconds()
        - held_seconds(policy_id=policy_id, since=started, until=ended)
        for started, ended in earlier.values_list("started_at", "ended_at")
        if started is not None and ended is not None
    )
