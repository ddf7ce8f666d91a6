"""The lease of this process: renewed by a thread, and what tells the stages to stop."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError

from rollouts.models import Attempt
from rollouts.services.claim import Claim
from rollouts.services.workers import Registration, end_worker, register_worker, renew_worker
from rollouts.stages.database import database
from rollouts.states import AttemptState

logger = logging.getLogger(__name__)

StopCause = Literal["cancelled", "lost", "shutdown"]


@dataclass
class Held:
    """A claim in the hands of a stage; every blocking call polls `stopping`."""

    claim: Claim
    cause: StopCause | None = None
    _deadline: float = field(default=0.0)

    def __post_init__(self) -> None:
        budget = min(self.claim.budget_seconds, settings.STAGE_LIMIT_SECONDS)
        self._deadline = time.monotonic() + budget

    def stopping(self) -> bool:
        """Tell whether the stage must stop now."""
        return self.cause is not None

    def remaining_seconds(self) -> float:
        """Return the seconds left of the stage's budget, by the monotonic clock."""
        return max(0.0, self._deadline - time.monotonic())


class ProcessLease:
    """Keep one worker process registered, and watch over the attempts that it holds.

    The process stops its work by itself when it could not renew for two thirds of the lease.
    """

    def __init__(self, *, stage: str, concurrency: int) -> None:
        self._stage = stage
        self._concurrency = concurrency
        self._held: dict[UUID, Held] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._draining = False
        self._renewed = time.monotonic()
        self._registration: Registration | None = None
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)

    def start(self) -> None:
        """Register, and begin to renew."""
        self._register()
        self._thread.start()

    def registration(self) -> Registration:
        """Return the present registration."""
        registration = self._registration
        if registration is None:
            raise DatabaseError("this worker is not registered yet")
        return registration

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[Held]:
        """Watch over a claim while a stage works on it."""
        held = Held(claim, cause="shutdown" if self._draining else None)
        with self._lock:
            self._held[claim.attempt_id] = held
        try:
            yield held
        finally:
            with self._lock:
                self._held.pop(claim.attempt_id, None)

    def drain(self) -> None:
        """Tell every stage at work to give its attempt back: the process is to end."""
        self._draining = True
        self._stop_all("shutdown")

    def close(self) -> None:
        """End the registration; what is still held is recovered at once."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        if self._registration is not None:
            with database():
                end_worker(worker_id=self._registration.worker_id)

    def _register(self) -> None:
        with database():
            self._registration = register_worker(
                stage=self._stage, pid=os.getpid(), concurrency=self._concurrency
            )
        self._renewed = time.monotonic()

    def _loop(self) -> None:
        pause = min(settings.HEARTBEAT_SECONDS, settings.CANCEL_POLL_SECONDS)
        while not self._closing.wait(pause):
            try:
                with database():
                    self._watch()
                    if time.monotonic() - self._renewed >= settings.HEARTBEAT_SECONDS:
                        self._renew()
            except DatabaseError:
                logger.warning("cannot renew the lease: the database does not answer")
            except Exception:
                # Without this thread the process would be taken for dead while it works.
                logger.exception("the lease's thread goes on after an error")
            if time.monotonic() - self._renewed > settings.LEASE_SECONDS * 2 / 3:
                self._stop_all("lost")

    def _renew(self) -> None:
        began = time.monotonic()
        if renew_worker(worker_id=self.registration().worker_id):
            self._renewed = began
            return
        logger.warning("this worker was taken for dead: it drops its work and registers again")
        self._stop_all("lost")
        self._register()

    def _watch(self) -> None:
        """Find the attempts whose rollout is to be cancelled, and those held no longer."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        rows = {
            row[0]: row[1:]
            for row in Attempt.objects.filter(pk__in=held).values_list(
                "pk", "state", "lease_token", "rollout__cancel_requested_at"
            )
        }
        for attempt_id, each in held.items():
            state, token, cancel = rows.get(attempt_id, (None, None, None))
            if state != AttemptState.RUNNING or token != each.claim.token:
                each.cause = "lost"
            elif cancel is not None and each.cause is None:
                each.cause = "cancelled"

    def _stop_all(self, cause: StopCause) -> None:
        with self._lock:
            for each in self._held.values():
                if each.cause is None or cause == "lost":
                    each.cause = cause
