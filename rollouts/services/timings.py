"""Seconds that a rollout spent in each stage and queue, from its attempts."""

from uuid import UUID

from django.utils import timezone

from rollouts.models import Attempt


def stage_timings(*, rollout_id: UUID) -> dict[str, float]:
    """Return seconds by `init`, `run`, `eval` and `queue_init`, `queue_run`, `queue_eval`.

    All tries of a stage add up; waiting for a free slot before INIT is not counted here.
    """
    now = timezone.now()
    totals: dict[str, float] = {}
    for attempt in Attempt.objects.filter(rollout_id=rollout_id):
        ended = attempt.ended_at or now
        started = attempt.started_at
        waited = ((started or ended) - attempt.created_at).total_seconds()
        queue = f"queue_{attempt.stage}"
        totals[queue] = totals.get(queue, 0.0) + max(0.0, waited)
        if started is not None:
            spent = (ended - started).total_seconds()
            totals[attempt.stage] = totals.get(attempt.stage, 0.0) + max(0.0, spent)
    return {name: round(seconds, 4) for name, seconds in totals.items()}
