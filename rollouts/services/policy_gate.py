"""The gates of policies in the broker's store, as this process reaches them."""

from functools import lru_cache
from typing import Any

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollouts.inference.gate import PolicyGate


@lru_cache(maxsize=1)
def policy_gate() -> PolicyGate:
    """Return the gates, shared by all threads of this process."""
    client: Any = redis.Redis.from_url(
        settings.BROKER_URL,
        socket_connect_timeout=2,
        socket_timeout=2,
        retry=Retry(NoBackoff(), retries=1),
    )
    return PolicyGate(
        client,
        namespace=f"prorl:{settings.DEPLOYMENT}",
        lease_seconds=settings.POLICY_GATE_LEASE_SECONDS,
    )
