"""The lease of a worker process: by the database's clock, and true when its thread hangs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from celery.signals import worker_ready
from django.db import OperationalError, connection
from django.utils import timezone

from rollouts import worker
from rollouts.models import Attempt, Rollout, Worker
from rollouts.services.claim import Claim
from rollouts.services.finish import finish_init
from rollouts.services.workers import end_worker, register_worker, renew_worker
from rollouts.stages import lease as lease_module
from rollouts.stages import process
from rollouts.stages.lease import Held, NotRegistered, ProcessLease
from sandboxes.models import Node
from tests.services.line import bring_to, claim_active, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.LEASE_SECONDS = 3
    settings.HEARTBEAT_SECONDS = 0.2
    settings.CANCEL_POLL_SECONDS = 0.1


@contextmanager
def running_lease(stage: str = "run") -> Iterator[ProcessLease]:
    lease = ProcessLease(stage=stage, concurrency=1)
    lease.start()
    try:
        yield lease
    finally:
        lease.close()


def until(condition: Callable[[], Any], seconds: float = 15) -> Any:
    """Return the condition's first true value; fail when the time is over."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def claimed(lease: ProcessLease) -> Claim:
    """Return a RUN claim of the leased process."""
    registration = lease.registration()
    claim = bring_to(Rollout.objects.get(), "init", make_node())
    assert claim is not None
    finish_init(claim=claim)
    return claim_active(Rollout.objects.get(), registration)


@pytest.mark.parametrize("hours", [-1, 1])
def test_leases_are_stamped_by_the_databases_clock(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    def wrong() -> Any:
        return real() + timedelta(hours=hours)

    real = timezone.now
    monkeypatch.setattr(timezone, "now", wrong)
    registered = register_worker(stage="run", pid=1, concurrency=1)
    first = Worker.objects.get()
    assert renew_worker(worker_id=registered.worker_id) is True
    monkeypatch.undo()

    second = Worker.objects.get()
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        (now,) = cursor.fetchone()
    for row in (first, second):
        assert timedelta(0) < row.lease_expires_at - now <= timedelta(seconds=3)
    assert second.lease_expires_at > first.lease_expires_at
    assert abs(Node.objects.get().seen_at - now) < timedelta(seconds=3)  # type: ignore[operator]


def test_an_ended_worker_is_not_renewed_and_ends_once() -> None:
    registered = register_worker(stage="run", pid=1, concurrency=1)
    end_worker(worker_id=registered.worker_id)
    ended = Worker.objects.get()
    end_worker(worker_id=registered.worker_id)

    assert renew_worker(worker_id=registered.worker_id) is False
    again = Worker.objects.get()
    assert ended.ended_at is not None
    assert (again.ended_at, again.lease_expires_at) == (ended.ended_at, ended.lease_expires_at)


def test_a_stage_stops_when_the_renewal_hangs_and_its_attempt_is_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_group()
    with running_lease() as lease:
        claim = claimed(lease)
        old = lease.registration()
        entered, release = threading.Event(), threading.Event()

        def hang(**_: Any) -> bool:
            entered.set()
            assert release.wait(30)
            return True

        with lease.hold(claim) as held:
            assert held.stopping() is False
            monkeypatch.setattr(lease_module, "renew_worker", hang)
            assert entered.wait(10)
            until(held.stopping)
            assert held.cause == "lost"
        release.set()
        monkeypatch.undo()

        until(
            lambda: (
                Worker.objects.filter(ended_at__isnull=True, stage="run", pid__gt=1)
                .exclude(pk=old.worker_id)
                .exists()
            )
        )
        new = lease.registration()
        assert new.worker_id != old.worker_id
        assert Worker.objects.get(pk=old.worker_id).ended_at is not None
        attempt = Attempt.objects.get(pk=claim.attempt_id)
        assert (attempt.state, attempt.failure_code) == ("lost", "run.worker_lost")


def test_a_renewed_lease_stops_nothing() -> None:
    make_group()
    with running_lease() as lease:
        claim = claimed(lease)
        worker_id = lease.registration().worker_id
        began = Worker.objects.get(pk=worker_id).lease_expires_at
        with lease.hold(claim) as held:
            until(
                lambda: (
                    Worker.objects.get(pk=worker_id).lease_expires_at > began + timedelta(seconds=3)
                )
            )
            assert held.stopping() is False
            assert held.cause is None


def test_a_worker_whose_registration_failed_registers_later_and_tasks_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = register_worker, []

    def flaky(**values: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError("the database system is starting up")
        return real(**values)

    monkeypatch.setattr(lease_module, "register_worker", flaky)
    monkeypatch.setattr(process, "_lease", None)
    monkeypatch.setattr(worker, "_stage", "run")
    monkeypatch.setattr(worker, "_prefork", False)
    worker_ready.connect(worker._ready)
    try:
        worker_ready.send(sender=None)
        worker_ready.send(sender=None)  # as after each reconnection to the broker
        registration = process.lease().registration()
        row = Worker.objects.get()
    finally:
        worker_ready.disconnect(worker._ready)
        process.end()

    assert len(calls) == 2
    assert (registration.worker_id, row.stage) == (row.pk, "run")
    assert Worker.objects.get().ended_at is not None


def test_without_a_registration_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(**_: Any) -> Any:
        raise OperationalError("the database system is starting up")

    monkeypatch.setattr(lease_module, "register_worker", down)
    monkeypatch.setattr(lease_module, "REGISTRATION_WAIT_SECONDS", 0.2)
    with running_lease() as lease:
        with pytest.raises(NotRegistered):
            lease.registration()
        monkeypatch.setattr(lease_module, "REGISTRATION_WAIT_SECONDS", 3600)
        lease.drain()
        with pytest.raises(NotRegistered):
            lease.registration()
    assert not Worker.objects.exists()


def test_a_claim_taken_while_draining_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    make_group()
    with running_lease() as lease:
        claim = claimed(lease)
        lease.drain()
        with lease.hold(claim) as held:
            assert held.stopping() is True
            assert held.cause == "shutdown"


def test_a_loss_goes_before_every_other_cause() -> None:
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", make_node())
    assert claim is not None
    held = Held(claim, cause="shutdown", lost=lambda: True)

    assert held.stopping() is True
    assert held.cause == "lost"
