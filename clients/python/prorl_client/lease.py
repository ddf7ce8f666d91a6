"""Keep the leases of batches alive while a trainer works.

A thread and not an asyncio task, for asynchronous trainers too: a training step that blocks the
event loop for minutes would stop a task just when it is needed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from prorl_client.errors import (
    LeaseExpired,
    NotFound,
    ProblemError,
    ProrlError,
    ServerError,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
LONGEST_LEASE_SECONDS = 86_400.0  # what the service grants at once


@dataclass(frozen=True)
class KeepAlive:
    """How leases are lengthened.

    Each time a third of a lease has passed it is lengthened to `seconds` from then (None: to what
    the service gave), until the batch is closed or forgotten, or `longest_seconds` after the lease
    began: a trainer that hangs must not keep its groups for ever.
    """

    seconds: float | None = None
    longest_seconds: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if self.seconds is not None and not 1.0 <= self.seconds <= LONGEST_LEASE_SECONDS:
            raise ValueError(
                f"A lease is lengthened to 1 to {LONGEST_LEASE_SECONDS:g} seconds, not to "
                f"{self.seconds:g}."
            )


class Lease:
    """A lease in hand: until when it holds by this machine's monotonic clock, and its end."""

    def __init__(self, batch_id: str, seconds: float, keep: KeepAlive | None) -> None:
        self.batch_id = batch_id
        self.keep = keep
        self.began = monotonic()
        wanted = seconds if keep is None or keep.seconds is None else keep.seconds
        self.seconds = min(max(1.0, wanted), LONGEST_LEASE_SECONDS)
        self.due = self.began + min(seconds, self.seconds) / 3
        self.holds_until = self.began + seconds
        self.closed = False
        self.fault: ProrlError | None = None  # for which it is lengthened no more

    @property
    def is_lost(self) -> bool:
        """Whether it has ended before it was closed, as was told or by the clock."""
        if self.closed:
            return False
        return isinstance(self.fault, (LeaseExpired, NotFound)) or monotonic() > self.holds_until

    @property
    def is_kept(self) -> bool:
        """Whether it is lengthened again."""
        return self.keep is not None and not self.closed and self.fault is None

    def close(self) -> None:
        """Lengthen it no more."""
        self.closed = True


class LeaseKeeper:
    """Lengthen leases from one daemon thread, which ends when there are none."""

    def __init__(self, extend: Callable[[str, float], None]) -> None:
        self._extend = extend
        self._leases: list[weakref.ref[Lease]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, lease: Lease) -> None:
        """Lengthen a lease until it is closed, its batch is forgotten, or it is lost."""
        if not lease.is_kept:
            return
        with self._changed:
            self._leases.append(weakref.ref(lease))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="prorl-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Lengthen nothing more."""
        with self._changed:
            self._leases.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._next()
                if due is None:
                    self._thread = None
                    return
                wait = due - monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
            self._lengthen_due()

    def _alive(self) -> list[Lease]:
        found = [lease for each in self._leases if (lease := each()) is not None]
        kept = [lease for lease in found if lease.is_kept]
        self._leases = [weakref.ref(lease) for lease in kept]
        return kept

    def _next(self) -> float | None:
        return min((lease.due for lease in self._alive()), default=None)

    def _lengthen_due(self) -> None:
        # In a frame of its own: no strong reference to a lease may be left while waiting.
        with self._changed:
            due = [lease for lease in self._alive() if lease.due <= monotonic()]
        for lease in due:
            self._lengthen(lease)

    def _lengthen(self, lease: Lease) -> None:
        began = monotonic()
        assert lease.keep is not None
        if began - lease.began > lease.keep.longest_seconds:
            logger.warning(
                "batch %s was held for %.0f s; its lease is lengthened no more",
                lease.batch_id,
                began - lease.began,
            )
            lease.keep = None
            return
        try:
            self._extend(lease.batch_id, lease.seconds)
        except ProrlError as fault:
            if isinstance(fault, ProblemError) and not isinstance(fault, ServerError):
                lease.fault = fault  # trying again does not help
            lease.due = monotonic() + RETRY_SECONDS
            logger.warning("the lease of batch %s was not lengthened: %s", lease.batch_id, fault)
        except Exception:  # one lease's fault must not end the keeping of the others
            lease.due = monotonic() + RETRY_SECONDS
            logger.exception("the lease of batch %s was not lengthened", lease.batch_id)
        else:
            lease.holds_until = began + lease.seconds
            lease.due = began + lease.seconds / 3
