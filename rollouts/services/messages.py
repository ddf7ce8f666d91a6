"""Publishing: a message is a hint that carries one id; the reaper publishes again what is lost."""

import logging
from functools import partial
from uuid import UUID

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

from rollouts import queues

logger = logging.getLogger(__name__)
_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}


def _send(name: str, args: list[str], stage: str, node: str | None) -> None:
    try:
        current_app.send_task(
            name,
            args=args,
            queue=queues.stage_queue(stage, node),  # type: ignore[arg-type]
            retry=True,
            retry_policy=_RETRY,
            argsrepr="(…)",
        )
    except OperationalError:
        logger.warning("broker unreachable: %s %s waits for the reaper", name, args)


def publish_attempt(*, attempt_id: UUID, stage: str, node: str | None) -> None:
    """Publish an attempt to its stage's queue once the transaction has committed."""
    transaction.on_commit(partial(_send, queues.STAGE_TASK[stage], [str(attempt_id)], stage, node))


def publish_sweep(*, node: str) -> None:
    """Ask a node to remove the sandboxes that nothing owns, once the transaction has committed."""
    transaction.on_commit(partial(_send, queues.SWEEP_TASK, [node], queues.INIT, node))


def publish_dispatch() -> None:
    """Ask for a dispatch soon, once the transaction has committed."""
    transaction.on_commit(partial(_send, queues.DISPATCH_TASK, [], queues.CONTROL, None))
