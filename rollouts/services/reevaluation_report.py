"""What a re-evaluation found so far, beside the rewards that the rollouts have."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection

from rollouts.models import Reevaluation, Rollout
from rollouts.states import ReevaluationState

MAX_CHANGED = 100
SAME = 1e-9

_SUMS = """
SELECT count(*) AS done,
       count(again.reward) AS scored,
       avg(rollout.reward) FILTER (WHERE again.reward IS NOT NULL) AS mean_before,
       avg(again.reward) AS mean_after,
       count(*) FILTER (WHERE abs(again.reward - rollout.reward) <= %(same)s) AS agreeing
FROM rollouts_evaluation AS again
JOIN rollouts_rollout AS rollout ON rollout.id = again.rollout_id
WHERE again.reevaluation_id = %(job)s
"""
_FAULTS = """
SELECT code, count(*) FROM rollouts_evaluation
WHERE reevaluation_id = %(job)s AND reward IS NULL GROUP BY code ORDER BY code
"""
_CHANGED = """
SELECT again.rollout_id, task.ref, rollout.reward, again.reward
FROM rollouts_evaluation AS again
JOIN rollouts_rollout AS rollout ON rollout.id = again.rollout_id
JOIN rollouts_group AS own ON own.id = rollout.group_id
JOIN rollouts_task AS task ON task.id = own.task_id
WHERE again.reevaluation_id = %(job)s AND abs(again.reward - rollout.reward) > %(same)s
ORDER BY abs(again.reward - rollout.reward) DESC, again.rollout_id
LIMIT %(most)s
"""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A rollout with another reward than it has."""

    rollout: UUID
    task_ref: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class ReevaluationReport:
    """How far a job is and what it found: means are over the rollouts that were scored again.

    `agreement` is the share of them with the same reward as before; None while there is none.
    `changed` are those that differ most; `changed_count` counts all.
    """

    total: int
    done: int
    scored: int
    faults: dict[str, int]
    mean_before: float | None
    mean_after: float | None
    agreement: float | None
    changed_count: int
    changed: list[Changed]


def report_reevaluation(*, job: Reevaluation) -> ReevaluationReport:
    """Return what a job found so far."""
    values: dict[str, Any] = {"job": job.pk, "same": SAME, "most": MAX_CHANGED}
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, values)
        done, scored, before, after, agreeing = cursor.fetchone()
        cursor.execute(_FAULTS, values)
        faults = dict(cursor.fetchall())
        cursor.execute(_CHANGED, values)
        changed = [
            Changed(rollout=rollout, task_ref=ref, before=old, after=new)
            for rollout, ref, old, new in cursor.fetchall()
        ]
    total = done
    if job.state != ReevaluationState.DONE:
        total = Rollout.objects.scored().filter(experiment=job.experiment_id).count()
    return ReevaluationReport(
        total=total,
        done=done,
        scored=scored,
        faults=faults,
        mean_before=before,
        mean_after=after,
        agreement=agreeing / scored if scored else None,
        changed_count=scored - agreeing,
        changed=changed,
    )
