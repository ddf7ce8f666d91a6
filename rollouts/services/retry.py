"""What happens after a failed or lost attempt: the same stage again, INIT again, or the end."""

from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.db.models import F
from django.utils import timezone

from rollouts.models import JournalEntry, Rollout, Worker
from rollouts.services.attempts import UNCOUNTED, attempts_used, open_attempt
from rollouts.services.discard import forget_trajectory
from rollouts.services.end import end_rollout
from rollouts.services.messages import publish_dispatch, publish_sweep
from rollouts.states import Event, Outcome, RolloutState, Stage, sources
from rollouts.text import clean_text
from sandboxes.models import Node
from sandboxes.services.lifecycle import give_up_sandboxes

MAX_DELAY_SECONDS = 300.0


def after_fault(
    *,
    rollout_id: UUID,
    stage: str,
    code: str,
    detail: str,
    retryable: bool = True,
    restart_from_init: bool = False,
    timed_out: bool = False,
) -> None:
    """Decide and write what follows an attempt that did not finish.

    Call inside a transaction, after the attempt was closed. A rollout whose cancel was asked for
    ends as cancelled; one with tries left goes on; else it ends without a reward.
    """
    rollout = (
        Rollout.objects.select_for_update(of=("self",))
        .select_related("experiment", "node")
        .get(pk=rollout_id)
    )
    if rollout.state == RolloutState.DONE:
        return
    if rollout.cancel_requested_at is not None:
        end_rollout(rollout_id=rollout_id, outcome=Outcome.CANCELLED)
        return
    counts = code not in UNCOUNTED
    used = attempts_used(rollout=rollout, stage=stage)
    if not retryable or (counts and used >= rollout.experiment.max_attempts):
        end_rollout(
            rollout_id=rollout_id,
            outcome=Outcome.TIMED_OUT if timed_out else Outcome.INFRA_FAILED,
            failure_code=code,
            failure_detail=clean_text(detail)[:4000],
        )
        return
    node = rollout.node if rollout.needs_sandbox else None
    stays = stage != Stage.INIT and not restart_from_init
    if stays and (node is None or _has_workers(node, stage)):
        open_attempt(rollout=rollout, stage=stage, node=node)
        return
    restart_rollout(rollout=rollout)


def restart_rollout(*, rollout: Rollout) -> bool:
    """Send a rollout back to the queue before INIT; its sandboxes and journal are given up."""
    delay = min(settings.RETRY_DELAY_SECONDS * 2**rollout.restarts, MAX_DELAY_SECONDS)
    now = timezone.now()
    won = Rollout.objects.filter(pk=rollout.pk, state__in=sources(Event.RESTART)).update(
        state=RolloutState.QUEUED,
        node=None,
        restarts=F("restarts") + 1,
        not_before=now + timedelta(seconds=delay),
        queued_at=now,
        turns=0,
        sampled_tokens=0,
        tool_calls=0,
        answer=None,
        last_message="",
        stop_reason=None,
    )
    if not won:
        return False
    JournalEntry.objects.filter(rollout=rollout).delete()
    forget_trajectory(rollout_id=rollout.pk)
    for name in give_up_sandboxes(owner=rollout.pk):
        publish_sweep(node=name)
    publish_dispatch()
    return True


def _has_workers(node: Node, stage: str) -> bool:
    return Worker.objects.live().filter(node=node, stage=stage).exists()
