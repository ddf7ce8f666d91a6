"""Leases that are kept while a trainer works, and those that are not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from time import monotonic

import pytest
from prorl_client import Client, KeepAlive, LeaseExpired, ServiceUnreachable
from prorl_client.errors import problem_from
from prorl_client.lease import Lease, LeaseKeeper

from tests.clients import shapes
from tests.clients.scripted import Reply, Scripted, problem

EXTEND = f"/batches/{shapes.BATCH}/extend/"
ACK = f"/batches/{shapes.BATCH}/ack/"
SHORT = 0.03
LOST = problem_from(
    status=409, headers={}, body=b'{"code": "batch.expired"}', call="", request_id=None
)


class Extensions:
    """Take down what a keeper lengthens; fail as told."""

    def __init__(self, *faults: Exception) -> None:
        self.calls: list[tuple[str, float]] = []
        self._faults = list(faults)
        self._came = threading.Condition()

    def __call__(self, batch_id: str, seconds: float) -> None:
        with self._came:
            self.calls.append((batch_id, seconds))
            self._came.notify_all()
            if self._faults:
                raise self._faults.pop(0)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._came:
            assert self._came.wait_for(condition, 60)


def ended(keeper: LeaseKeeper) -> bool:
    """Wait until the keeper's thread has nothing more to do."""
    thread = keeper._thread
    if thread is not None:
        thread.join(60)
    return keeper._thread is None


def due_now(lease: Lease) -> Lease:
    """Make a lease due at once."""
    lease.due = monotonic()
    return lease


def test_lease_is_lengthened_again_and_again_until_it_is_closed() -> None:
    extensions = Extensions()
    keeper = LeaseKeeper(extensions)
    lease = due_now(Lease("b", 1.0, KeepAlive()))
    until = lease.holds_until

    keeper.watch(lease)
    extensions.wait_for(lambda: len(extensions.calls) >= 2)
    lease.close()

    assert ended(keeper)
    assert set(extensions.calls) == {("b", 1.0)}
    assert lease.holds_until > until


def test_first_third_of_a_lease_passes_before_it_is_lengthened() -> None:
    assert Lease("b", 900.0, KeepAlive()).due == pytest.approx(monotonic() + 300, abs=60)
    longer = Lease("b", 900.0, KeepAlive(seconds=3600))
    assert (longer.seconds, longer.due < longer.holds_until) == (3600, True)


def test_lease_that_nobody_holds_any_more_is_forgotten() -> None:
    extensions = Extensions()
    keeper = LeaseKeeper(extensions)
    lease = due_now(Lease("b", 1.0, KeepAlive()))
    keeper.watch(lease)
    extensions.wait_for(lambda: len(extensions.calls) >= 1)

    del lease
    gc.collect()

    assert ended(keeper)


def test_lost_lease_is_not_lengthened_again_and_others_are() -> None:
    extensions = Extensions(LOST)
    keeper = LeaseKeeper(extensions)
    lost, other = due_now(Lease("lost", 1.0, KeepAlive())), due_now(Lease("b", 1.0, KeepAlive()))

    keeper.watch(lost)
    extensions.wait_for(lambda: len(extensions.calls) == 1)
    keeper.watch(other)
    extensions.wait_for(lambda: len(extensions.calls) >= 3)
    other.close()

    assert ended(keeper)
    assert isinstance(lost.fault, LeaseExpired)
    assert [batch for batch, _seconds in extensions.calls[:3]] == ["lost", "b", "b"]


@pytest.mark.parametrize("fault", [ServiceUnreachable("away"), RuntimeError("ours")])
def test_fault_is_tried_again(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_client.lease.RETRY_SECONDS", 0.01)
    extensions = Extensions(fault)
    keeper = LeaseKeeper(extensions)
    lease = due_now(Lease("b", 1.0, KeepAlive()))

    keeper.watch(lease)
    extensions.wait_for(lambda: len(extensions.calls) >= 2)
    lease.close()

    assert ended(keeper)
    assert lease.fault is None


def test_trainer_that_hangs_keeps_its_lease_only_so_long() -> None:
    extensions = Extensions()
    keeper = LeaseKeeper(extensions)
    lease = due_now(Lease("b", 1.0, KeepAlive(longest_seconds=0.0)))

    keeper.watch(lease)

    assert ended(keeper)
    assert (extensions.calls, lease.closed, lease.is_kept) == ([], False, False)


@pytest.mark.parametrize("seconds", [0, 0.5, 86_401, float("nan")])
def test_lease_of_a_length_that_is_none(seconds: float) -> None:
    with pytest.raises(ValueError, match="1 to 86400 seconds"):
        KeepAlive(seconds=seconds)


def test_lease_that_may_not_be_lengthened_is_left_alone() -> None:
    refused = problem_from(
        status=401, headers={}, body=b'{"code": "auth.invalid"}', call="", request_id=None
    )
    extensions = Extensions(refused)
    keeper = LeaseKeeper(extensions)
    lease = due_now(Lease("b", 900.0, KeepAlive()))

    keeper.watch(lease)

    assert ended(keeper)
    assert (len(extensions.calls), lease.fault, lease.is_lost) == (1, refused, False)


def test_keeping_can_be_switched_off() -> None:
    keeper = LeaseKeeper(Extensions())

    keeper.watch(Lease("b", 1.0, None))

    assert keeper._thread is None


def test_batch_in_hand_is_kept_by_the_services_clock_and_let_go_at_the_acknowledgement(
    service: Scripted, client: Client
) -> None:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    # Three seconds by the service's clock: the first extension comes after one.
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0), seconds=3.5))
    service.on("POST", EXTEND, Reply(body=shapes.batch()))
    service.on("POST", ACK, Reply(body=shapes.batch(state="acknowledged")))

    batch = client.experiment("e1").lease(groups=1)
    first = service.wait_for("POST", EXTEND, 1)[0]
    batch.ack()

    assert first.body == {"seconds": batch.lease.seconds}
    assert 1.0 <= batch.lease.seconds <= 4.0
    assert ended(client.lease_keeper)
    assert first.headers["authorization"] == "Bearer secret"


def test_trainer_learns_that_its_lease_was_lost(service: Scripted, client: Client) -> None:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0), seconds=1.0))
    service.on("POST", EXTEND, problem(409, "batch.rewound"))

    batch = client.experiment("e1").lease(groups=1)
    service.wait_for("POST", EXTEND, 1)

    assert ended(client.lease_keeper)
    assert batch.is_lost
    assert isinstance(batch.lease.fault, LeaseExpired)


def test_lease_is_lengthened_by_hand(service: Scripted, client: Client) -> None:
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("POST", shapes.BATCHES, shapes.json_batch(shapes.trajectory(0)))
    service.on("POST", EXTEND, Reply(body=shapes.batch()))
    batch = client.experiment("e1").lease(groups=1, keep_alive=None)
    before = batch.lease.holds_until

    batch.extend(7200)

    assert service.calls("POST", EXTEND)[0].body == {"seconds": 7200}
    assert batch.lease.holds_until > before + 3600
