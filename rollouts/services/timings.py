"""Seconds that a rollout spent in each stage and queue, from its attempts."""

from uuid import UUID

from django.utils import timezone

from rollouts.models import Attempt, Rollout


def stage_timings(*, rollout_id: UUID) -> dict[str, float]:
    """Return seconds by `init`, `run`, `eval` and `queue_init`, `queue_run`, `queue_eval`.

    All tries of a stage since an operator's last retry add up; waiting for a free slot before
    INIT is not counted here.
    """
    now = timezone.now()
    totals: dict[str, float] = {}
    attempts = Attempt.objects.filter(rollout_id=rollout_id)
    retried_at = Rollout.objects.values_list("retried_at", flat=True).get(pk=rollout_id)
    if retried_at is not None:
        attempts = attempts.filter(created_at__gte=retried_at)
    for attempt in attempts:
        ended = attempt.ended_at or now
        started = attempt.started_at
        waited = ((started or ended) - attempt.created_at).total_seconds()
        queue = f"queue_{attempt.stage}"
        totals[queue] = totals.get(queue, 0.0) + max(0.0, waited)
        if started is not None:
            spent = (ended - started).total_seconds()
            totals[attempt.stage] = totals.get(attempt.stage, 0.0) + max(0.0, spent)
    return {name: round(seconds, 4) for name, seconds in totals.items()}
