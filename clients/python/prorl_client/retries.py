"""When a call is sent again, and after how long; nothing here waits or sends."""

from __future__ import annotations

import random
from dataclasses import dataclass

from prorl_client.errors import ProblemError

# An answer of one of these changed nothing, or the same key makes it change nothing twice.
AGAIN_STATUSES = (429, 502, 503, 504)
RUNNING = "idempotency.running"


@dataclass(frozen=True)
class RetryPolicy:
    """How long to insist.

    A call is sent again after connection faults, after 429, 502, 503 and 504, and while its first
    try still runs, until `total_seconds` after the first try. Pauses double from `first_seconds`
    to `longest_seconds`, each with up to a quarter taken off at random; the service's Retry-After
    is kept when it is longer.
    """

    total_seconds: float = 300.0
    first_seconds: float = 0.2
    longest_seconds: float = 15.0

    def pause(self, tries: int, fault: Exception) -> float | None:
        """Return the seconds to wait after so many failed tries; None: the fault is final."""
        asked = 0.0
        if "CERTIFICATE_VERIFY_FAILED" in str(fault):
            return None
        if isinstance(fault, ProblemError):
            if fault.status not in AGAIN_STATUSES and fault.code != RUNNING:
                return None
            asked = fault.retry_after or 0.0
        grown = min(self.longest_seconds, self.first_seconds * 2.0 ** min(tries - 1, 30))
        return max(asked, grown * (1 - random.random() / 4))  # noqa: S311 - spreads load only


@dataclass(frozen=True)
class Pauses:
    """Seconds between two looks at something that is waited for."""

    first_seconds: float = 0.1
    longest_seconds: float = 2.0

    def after(self, looks: int) -> float:
        """Return the pause after so many looks."""
        return min(self.longest_seconds, self.first_seconds * 1.5 ** min(looks, 60))
