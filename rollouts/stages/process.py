"""What one worker process has: its stage, its lease and its connection to the broker's store."""

from functools import lru_cache
from typing import Any

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollouts.inference.router import Router
from rollouts.stages.lease import ProcessLease

_lease: ProcessLease | None = None


def begin(*, stage: str, concurrency: int) -> None:
    """Begin to register this process for a stage, after any fork; once begun it stays so.

    Celery says that a worker is ready each time it has connected to the broker again. A database
    that does not answer yet is no error: what needs the registration waits for it.
    """
    global _lease
    if _lease is not None:
        return
    _lease = ProcessLease(stage=stage, concurrency=concurrency)
    _lease.start()


def lease() -> ProcessLease:
    """Return the lease of this process. Raises RuntimeError outside of a stage worker."""
    if _lease is None:
        raise RuntimeError("this process is no stage worker")
    return _lease


def drain() -> None:
    """Give back what is held, because the process is to end."""
    if _lease is not None:
        _lease.drain()


def end() -> None:
    """End the registration of this process; idempotent."""
    global _lease
    if _lease is not None:
        _lease.close()
        _lease = None


@lru_cache(maxsize=1)
def router() -> Router:
    """Return the router over the broker's store, shared by all threads of this process."""
    # The pool of servers has its own patience: a lost store must not hold a call for seconds.
    client: Any = redis.Redis.from_url(
        settings.BROKER_URL,
        socket_connect_timeout=2,
        socket_timeout=2,
        retry=Retry(NoBackoff(), retries=1),
    )
    return Router(client, namespace=f"prorl:{settings.DEPLOYMENT}")
