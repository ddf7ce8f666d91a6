"""The lease of this process: renewed by a thread, and what tells the stages to stop."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError

from rollouts.services.claim import Claim, changed_claims
from rollouts.services.reap import recover_orphans
from rollouts.services.workers import Registration, end_worker, register_worker, renew_worker
from rollouts.stages.database import database

logger = logging.getLogger(__name__)

StopCause = Literal["cancelled", "lost", "shutdown"]

REGISTRATION_WAIT_SECONDS = 20.0


class NotRegistered(Exception):
    """The process could not register, so that it may claim nothing."""

    code = "worker.not_registered"


class _Term:
    """One registration, from its first lease to its loss; a lost one never holds again."""

    def __init__(self, registration: Registration, *, began: float) -> None:
        self.registration = registration
        self._renewed = began
        self._lost = False
        self._lock = threading.Lock()

    def age_seconds(self) -> float:
        """Return the seconds since the last renewal was asked for, by the monotonic clock."""
        return time.monotonic() - self._renewed

    def renew(self, *, began: float) -> bool:
        """Note a renewal that was asked for at `began`; False when it comes too late."""
        with self._lock:
            if not self._lost:
                self._renewed = began
            return not self._lost

    def lost(self) -> bool:
        """Tell whether two thirds of a lease passed without a renewal, at any time.

        Needs neither the database nor the thread that renews: that one may hang.
        """
        with self._lock:
            self._lost = self._lost or self.age_seconds() > settings.LEASE_SECONDS * 2 / 3
            return self._lost


@dataclass
class Held:
    """A claim in the hands of a stage; every blocking call polls `stopping`."""

    claim: Claim
    cause: StopCause | None = None
    lost: Callable[[], bool] = field(default=lambda: False)
    _deadline: float = field(default=0.0)

    def __post_init__(self) -> None:
        budget = min(self.claim.budget_seconds, settings.STAGE_LIMIT_SECONDS)
        self._deadline = time.monotonic() + budget

    def stopping(self) -> bool:
        """Tell whether the stage must stop now; so when the process could not renew its lease."""
        if self.cause != "lost" and self.lost():
            self.cause = "lost"
        return self.cause is not None

    def extend(self, seconds: float) -> None:
        """Lengthen the budget by time in which the stage was kept from its work."""
        self._deadline += seconds

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
        self._term: _Term | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to register, as often as it takes, and then to renew."""
        self._thread.start()

    def registration(self) -> Registration:
        """Return the present registration, waiting for it a while. Raises NotRegistered."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._term is not None or self._draining or self._closing.is_set(),
                REGISTRATION_WAIT_SECONDS,
            )
            if self._term is None:
                raise NotRegistered("this worker process could not register")
            return self._term.registration

    @contextmanager
    def hold(self, claim: Claim) -> Iterator[Held]:
        """Watch over a claim while a stage works on it."""
        term = self._term
        # Without a registration the one that claimed was lost meanwhile, and the claim with it.
        held = Held(claim, lost=term.lost if term is not None else lambda: True)
        with self._lock:
            if self._draining:
                held.cause = "shutdown"
            self._held[claim.attempt_id] = held
        try:
            yield held
        finally:
            with self._lock:
                self._held.pop(claim.attempt_id, None)

    def drain(self) -> None:
        """Tell every stage at work to give its attempt back: the process is to end."""
        with self._lock:
            self._draining = True
        with self._changed:
            self._changed.notify_all()
        self._stop_all("shutdown")

    def close(self) -> None:
        """End the registration; what is still held is recovered at once.

        A database that does not answer is no error: the lease lapses by itself.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        if self._term is None:
            return
        try:
            with database():
                end_worker(worker_id=self._term.registration.worker_id)
        except DatabaseError:
            logger.warning("the end of this worker could not be written: its lease lapses")

    def _loop(self) -> None:
        pause = min(settings.HEARTBEAT_SECONDS, settings.CANCEL_POLL_SECONDS)
        while not self._closing.is_set():
            try:
                with database():
                    self._keep()
            except DatabaseError as error:
                logger.warning("cannot keep the lease: the database does not answer: %s", error)
            except Exception:
                # Without this thread the process would be taken for dead while it works.
                logger.exception("the lease's thread goes on after an error")
            term = self._term
            if term is not None and term.lost():
                self._stop_all("lost")
            self._closing.wait(pause)

    def _keep(self) -> None:
        """Do one round: register where needed, renew where due, look after what is held."""
        if self._term is None:
            self._register()
            return
        self._watch()
        if self._term.age_seconds() >= settings.HEARTBEAT_SECONDS:
            self._renew(self._term)

    def _register(self) -> None:
        began = time.monotonic()
        registration = register_worker(
            stage=self._stage, pid=os.getpid(), concurrency=self._concurrency
        )
        self._set_term(_Term(registration, began=began))

    def _renew(self, term: _Term) -> None:
        began = time.monotonic()
        worker_id = term.registration.worker_id
        if not term.lost() and renew_worker(worker_id=worker_id) and term.renew(began=began):
            with self._lock:
                held = set(self._held)
            recover_orphans(worker_id=worker_id, held=held)
            return
        logger.warning("this worker lost its lease: it drops its work and registers again")
        self._stop_all("lost")
        # Stages that saw the loss wrote nothing: their attempts are recovered now.
        end_worker(worker_id=worker_id)
        self._set_term(None)
        self._register()

    def _set_term(self, term: _Term | None) -> None:
        with self._changed:
            self._term = term
            self._changed.notify_all()

    def _watch(self) -> None:
        """Find the attempts whose rollout is to be cancelled, and those held no longer."""
        with self._lock:
            held = dict(self._held)
        if not held:
            return
        changed = changed_claims(claims=[each.claim for each in held.values()])
        for attempt_id, is_lost in changed.items():
            each = held[attempt_id]
            if is_lost:
                each.cause = "lost"
            elif each.cause is None:
                each.cause = "cancelled"

    def _stop_all(self, cause: StopCause) -> None:
        with self._lock:
            for each in self._held.values():
                if each.cause is None or cause == "lost":
                    each.cause = cause
