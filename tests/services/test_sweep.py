"""The sweep of a node: what nothing owns goes, what anything needs stays, leaks are counted."""

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from sandboxes.models import Node, Sandbox, Snapshot
from sandboxes.runtime.exceptions import StopFailed
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.layers import reference_of
from sandboxes.runtime.protocol import SandboxSpec
from sandboxes.services import node as node_service
from sandboxes.services.node import (
    LAYER_GRACE_SECONDS,
    sandbox_name,
    sandbox_prefix,
    sweep_node,
)
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["test", "warm-up"])
def here(request: pytest.FixtureRequest, settings: Any) -> Node:
    """Return the node that this process is, in deployments of any name."""
    settings.DEPLOYMENT = request.param
    settings.NODE_NAME = "here"
    return factories.make_node(name="here")


@pytest.fixture
def runtime(here: Node, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime(sandbox_prefix())
    monkeypatch.setattr(node_service, "node_runtime", lambda: made)
    monkeypatch.setattr(node_service, "_unowned_layers", {})
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the clock that the grace of layers is measured by: set `now`."""
    made = SimpleNamespace(now=1000.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(node_service, "time", made)
    return made


def start(runtime: FakeRuntime, name: str, layers: tuple[str, ...] = ()) -> str:
    runtime.start(SandboxSpec(name=name, image="base", layers=layers), timeout_seconds=60)
    return name


def layer(number: int) -> str:
    return f"layer-{number:032x}"


def leaked(here: Node) -> int:
    here.refresh_from_db()
    return here.leaked


def test_only_instances_that_nothing_owned_are_counted_as_leaked(
    runtime: FakeRuntime, here: Node
) -> None:
    other = factories.make_node()
    owned = factories.make_sandbox(node=here, state="ready")
    given_up = factories.make_sandbox(node=here, state="stopping")
    elsewhere = factories.make_sandbox(node=other, state="ready")
    gone = factories.make_sandbox(node=here, state="gone", gone_at=timezone.now())
    for row in (owned, given_up, elsewhere, gone):
        start(runtime, sandbox_name(row.pk))
    start(runtime, sandbox_name(uuid4()))
    start(runtime, f"{sandbox_prefix()}warm-17")  # one of the pool that its keeper left half done
    ahead = runtime.warm(SandboxSpec(name="warm", image="base"), timeout_seconds=60)

    assert sweep_node() == 5

    assert runtime.list() == [sandbox_name(owned.pk)]
    assert list(runtime.list_warm()) == [ahead]
    assert leaked(here) == 3  # of the other node's row, of the one that is gone, of no row
    assert leaked(other) == 0
    given_up.refresh_from_db()
    assert given_up.state == "gone"
    assert sweep_node() == 0
    start(runtime, sandbox_name(uuid4()))
    assert sweep_node() == 1
    assert leaked(here) == 4


def test_one_that_cannot_be_removed_is_counted_once_it_is(runtime: FakeRuntime, here: Node) -> None:
    names = sorted(start(runtime, sandbox_name(uuid4())) for _ in range(2))
    runtime.fail_next("stop", StopFailed("a process stays"))

    assert sweep_node() == 1
    assert (runtime.list(), leaked(here)) == ([names[0]], 1)
    assert sweep_node() == 1
    assert (runtime.list(), leaked(here)) == ([], 2)


def test_layers_that_anything_needs_stay_and_others_go_after_the_grace(
    runtime: FakeRuntime, here: Node, clock: Any
) -> None:
    for number in range(10):
        runtime.layers.keep(layer(number), {}, ())
    environment = factories.make_environment()
    taken = {"environment": environment, "turn": 1, "node": here, "ready_at": timezone.now()}
    Snapshot.objects.create(
        owner=uuid4(), state="ready", layers=[layer(1), layer(2), "prepared-x"], **taken
    )
    Snapshot.objects.create(owner=uuid4(), state="failed", layers=[layer(3)], **taken)
    factories.make_sandbox(node=here, state="frozen", frozen_layer=layer(4), layers=[layer(5)])
    factories.make_sandbox(node=here, state="ready", layers=[layer(6), layer(7)])
    past = {"state": "gone", "gone_at": timezone.now()}
    factories.make_sandbox(node=here, frozen_layer=layer(8), layers=[layer(9)], **past)
    kept = [layer(number) for number in (1, 2, 4, 5, 6, 7)]

    assert sweep_node() == 0
    clock.now += LAYER_GRACE_SECONDS - 1
    assert sweep_node() == 0
    assert len(runtime.list_layers()) == 10
    clock.now += 1
    assert sweep_node() == 4

    assert runtime.list_layers() == kept
    clock.now += 10 * LAYER_GRACE_SECONDS
    assert sweep_node() == 0
    assert runtime.list_layers() == kept


def test_the_grace_begins_anew_for_a_layer_that_was_owned_meanwhile(
    runtime: FakeRuntime, here: Node, clock: Any
) -> None:
    runtime.layers.keep(layer(1), {}, ())
    sweep_node()
    owner = factories.make_sandbox(node=here, state="ready", layers=[layer(1)])
    clock.now += LAYER_GRACE_SECONDS
    assert sweep_node() == 0
    Sandbox.objects.filter(pk=owner.pk).update(state="gone", gone_at=timezone.now())

    assert sweep_node() == 0
    clock.now += LAYER_GRACE_SECONDS
    assert sweep_node() == 1
    assert runtime.list_layers() == []


def test_the_layer_of_a_deleted_snapshot_goes(runtime: FakeRuntime, here: Node, clock: Any) -> None:
    runtime.layers.keep(layer(1), {}, ())
    runtime.layers.keep(layer(2), {}, (layer(1),))
    environment = factories.make_environment()
    taken = {"environment": environment, "turn": 1, "node": here, "ready_at": timezone.now()}
    parent = Snapshot.objects.create(owner=uuid4(), state="ready", layers=[layer(1)], **taken)
    child = Snapshot.objects.create(
        owner=uuid4(), state="ready", layers=[layer(2), layer(1)], **taken
    )
    for gone, left in ((parent, [layer(1), layer(2)]), (child, [])):
        gone.delete()
        sweep_node()
        clock.now += LAYER_GRACE_SECONDS
        sweep_node()
        assert runtime.list_layers() == left


def test_prepared_layers_stay_within_the_nodes_bound(
    runtime: FakeRuntime, settings: Any, clock: Any
) -> None:
    for key in ("used", "old", "new"):
        runtime.layers.keep(reference_of(key), {"/f": (b"12345", 0o644)}, ())
    owned = factories.make_sandbox(node=Node.objects.get(name="here"), state="ready")
    start(runtime, sandbox_name(owned.pk), (reference_of("used"),))
    settings.LAYER_CACHE_BYTES = 15
    assert sweep_node() == 0

    settings.LAYER_CACHE_BYTES = 14
    clock.now += 10 * LAYER_GRACE_SECONDS
    assert sweep_node() == 1

    found = [key for key in ("used", "old", "new") if runtime.find_layer(key)]
    assert found == ["used", "new"]


def test_a_sandbox_without_its_watchdog_is_stopped_and_the_rest_swept(
    runtime: FakeRuntime, here: Node, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    lost, kept = (factories.make_sandbox(node=here, state="ready") for _ in range(2))
    for row in (lost, kept):
        start(runtime, sandbox_name(row.pk))
    assert sweep_node() == 0
    monkeypatch.setattr(runtime, "unguarded", lambda: [sandbox_name(lost.pk)])
    runtime.fail_next("stop", StopFailed("a process stays"))
    runtime.fail_next("sweep", StopFailed("a folder stays"))

    assert sweep_node() == 0
    assert sweep_node() == 1

    assert runtime.list() == [sandbox_name(kept.pk)]
    assert leaked(here) == 0  # its row owned it
    assert [call for call in runtime.calls if call[0] == "sweep"] == [("sweep", "")] * 3
    assert f"instance {sandbox_name(lost.pk)} lost its watchdog: stopped" in caplog.messages
