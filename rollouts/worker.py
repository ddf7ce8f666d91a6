"""A Celery worker as a stage worker: its pool is checked, its process registered and ended."""

import logging
import os
import threading
from typing import Any

from celery.signals import (
    worker_init,
    worker_process_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from django.core import checks

from rollouts import queues
from rollouts.checks import pool_errors
from rollouts.stages import process
from sandboxes.services.node import close_node_runtime, node_runtime

logger = logging.getLogger(__name__)

_stage: str | None = None
_prefork = False
_concurrency = 1


def connect() -> None:
    """Connect the signals; called once when Celery loads the application."""
    worker_init.connect(_before_pool)
    worker_ready.connect(_ready)
    worker_process_init.connect(_child_started)
    worker_process_shutdown.connect(_child_ended)
    worker_shutting_down.connect(_shutting_down)
    worker_shutdown.connect(_ended)


def _before_pool(sender: Any, **_: Any) -> None:
    """Refuse a wrong pool or wrong settings; start the runtime before any thread."""
    global _stage, _prefork, _concurrency
    selected = list(sender.app.amqp.queues.consume_from)
    pool = sender.pool_cls if isinstance(sender.pool_cls, str) else sender.pool_cls.__module__
    problems = pool_errors(selected, pool)
    problems += [str(found) for found in checks.run_checks() if found.level >= checks.ERROR]
    if problems:
        raise SystemExit("This worker cannot start:\n- " + "\n- ".join(problems))
    stages = [name for name in queues.NODE_STAGES if name in selected]
    _stage = stages[0] if stages else None
    _prefork = "prefork" in pool
    _concurrency = int(sender.concurrency or 1)
    if _stage is not None and not _prefork:
        node_runtime()


def _ready(**_: Any) -> None:
    if _stage is not None and not _prefork:
        process.begin(stage=_stage, concurrency=_concurrency)


def _child_started(**_: Any) -> None:
    if _stage is not None and _prefork:
        node_runtime()
        process.begin(stage=_stage, concurrency=1)


def _child_ended(**_: Any) -> None:
    process.end()
    close_node_runtime()


def _shutting_down(**_: Any) -> None:
    """Give back what runs: the signal handler must not wait, so a thread does it."""
    threading.Thread(target=process.drain, name="drain", daemon=True).start()


def _ended(**_: Any) -> None:
    if not _prefork:
        process.end()
        close_node_runtime()
    logger.info("worker %d ended", os.getpid())
