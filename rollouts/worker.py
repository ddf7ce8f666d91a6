"""A Celery worker as a stage worker: its pool is checked, its process registered and ended."""

import logging
import os
import select
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
from rollouts.services.messages import flush
from rollouts.stages import process
from sandboxes.runtime.open_files import raise_file_limit
from sandboxes.services.node import close_node_runtime, node_runtime
from sandboxes.services.warm import WarmKeeper

logger = logging.getLogger(__name__)

_stage: str | None = None
_prefork = False
_concurrency = 1
# Readable in the children of a pool once the parent is to end: Celery tells them nothing of it.
_ending: tuple[int, int] | None = None
_warm: WarmKeeper | None = None


def connect() -> None:
    """Connect the signals; called once when Celery loads the application."""
    worker_init.connect(_before_pool)
    worker_ready.connect(_ready)
    worker_process_shutdown.connect(_child_ended)
    worker_shutting_down.connect(_shutting_down)
    worker_shutdown.connect(_ended)


def _before_pool(sender: Any, **_: Any) -> None:
    """Refuse a wrong pool or wrong settings; start the runtime before any thread."""
    global _stage, _prefork, _concurrency, _ending
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
    if _stage is None:
        return
    raise_file_limit()
    if _prefork:
        _ending = os.pipe()
        # Here, so that it comes after Celery's own receiver, which closes the pool of connections.
        worker_process_init.connect(_child_started)
    else:
        node_runtime()


def _ready(**_: Any) -> None:
    if _stage is not None and not _prefork:
        process.begin(stage=_stage, concurrency=_concurrency)
        _serve_node()


def _serve_node() -> None:
    """Say how this node keeps limits, and keep its warm pool: the INIT worker's part."""
    global _warm
    if _stage != queues.INIT or _warm is not None:
        return
    _warm = WarmKeeper()
    _warm.start()


def _child_started(**_: Any) -> None:
    if _stage is None or not _prefork:
        return
    node_runtime()
    process.begin(stage=_stage, concurrency=1)
    assert _ending is not None
    reader, writer = _ending
    os.close(writer)
    threading.Thread(target=_drain_with_parent, args=(reader,), name="drain", daemon=True).start()


def _drain_with_parent(reader: int) -> None:
    """Give back what runs once the parent says that it ends."""
    ending = select.poll()
    ending.register(reader, select.POLLIN)
    ending.poll()  # the byte stays unread: every child is to see it, and those forked later too
    process.drain()


def _child_ended(**_: Any) -> None:
    process.end()
    flush()
    close_node_runtime()


def _shutting_down(**_: Any) -> None:
    """Give back what runs: the signal handler must not wait, so a thread does it."""
    if _prefork and _ending is not None:
        os.write(_ending[1], b".")
    threading.Thread(target=process.drain, name="drain", daemon=True).start()


def _ended(**_: Any) -> None:
    if not _prefork:
        if _warm is not None:
            _warm.close()
        process.end()
        flush()
        close_node_runtime()
    logger.info("worker %d ended", os.getpid())
