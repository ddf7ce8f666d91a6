"""The warm pool: as many sandboxes as environments ask for, within what the node has room for."""

import fcntl
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollouts import worker
from sandboxes.models import Environment, Image, Node, Sandbox
from sandboxes.runtime.exceptions import ImageMissing, StartFailed, StopFailed
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.protocol import SandboxSpec
from sandboxes.services import node as node_service
from sandboxes.services import warm
from sandboxes.services.catalogue import save_environment, save_image
from sandboxes.services.node import sandbox_spec
from sandboxes.services.preparation import base_key, environment_recipe
from sandboxes.services.warm import LIFETIME_SECONDS, WarmKeeper, keep_warm, tell_enforcement
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def node(settings: Any, tmp_path: Path) -> Node:
    """Return the node that this process is, with eight slots."""
    settings.NODE_NAME = "here"
    settings.SANDBOX_ROOT = tmp_path
    return factories.make_node(name="here", capacity=8)


@pytest.fixture
def runtime(node: Node, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    for module in (warm, node_service):
        monkeypatch.setattr(module, "node_runtime", lambda: made)
    return made


@pytest.fixture
def image(db: None) -> Image:
    return save_image(name="base", source="/images/base")


def pool(runtime: FakeRuntime) -> Counter[tuple[Any, ...]]:
    """Return how many are started ahead, by image, layers and working directory."""
    return Counter((spec.image, spec.layers, spec.workdir) for spec in runtime.list_warm().values())


def plain(workdir: str = "/app", image: str = "/images/base") -> tuple[Any, ...]:
    return (image, (), workdir)


def test_as_many_are_started_as_environments_ask_for(runtime: FakeRuntime, image: Image) -> None:
    save_environment(name="a", image=image, warm=2, workdir="/a")
    save_environment(name="b", image=image, warm=1, workdir="/b", limits={"memory_bytes": 7})
    save_environment(name="c", image=image, warm=0, workdir="/c")
    save_environment(name="d", image=None, warm=3, workdir="/d")

    assert keep_warm() == 3

    assert pool(runtime) == {plain("/a"): 2, plain("/b"): 1}
    limits = {spec.workdir: spec.limits for spec in runtime.list_warm().values()}
    assert limits["/b"].memory_bytes == 7
    assert {each.lifetime_seconds for each in limits.values()} == {LIFETIME_SECONDS}
    assert keep_warm() == 0


def test_what_was_taken_is_replaced(runtime: FakeRuntime, image: Image) -> None:
    environment = save_environment(name="a", image=image, warm=2)
    keep_warm()
    runtime.start(sandbox_spec(name="taken", environment=environment), timeout_seconds=60)
    assert pool(runtime) == {plain(): 1}

    assert keep_warm() == 1
    assert pool(runtime) == {plain(): 2}


def test_environments_of_one_shape_share_their_sandboxes(
    runtime: FakeRuntime, image: Image
) -> None:
    save_environment(name="a", image=image, warm=2, system_prompt="x")
    save_environment(name="b", image=image, warm=3, system_prompt="y")

    assert keep_warm() == 5
    assert pool(runtime) == {plain(): 5}


@pytest.mark.parametrize(
    ("capacity", "used", "first", "second"),
    [(8, 0, 5, 3), (8, 4, 4, 0), (5, 0, 5, 0), (2, 4, 0, 0), (0, 0, 0, 0)],
)
def test_no_more_than_the_node_has_room_for(
    runtime: FakeRuntime,
    node: Node,
    image: Image,
    capacity: int,
    used: int,
    first: int,
    second: int,
) -> None:
    Node.objects.update(capacity=capacity)
    for _ in range(used):
        factories.make_sandbox(node=node)
    factories.make_sandbox(node=node, state="gone", gone_at=node.created_at)
    factories.make_sandbox()  # of another node
    save_environment(name="a", image=image, warm=5, workdir="/a")
    save_environment(name="b", image=image, warm=5, workdir="/b")

    assert keep_warm() == first + second
    assert pool(runtime) == Counter({plain("/a"): first, plain("/b"): second})


def test_too_many_are_ended(runtime: FakeRuntime, node: Node, image: Image) -> None:
    save_environment(name="a", image=image, warm=4)
    keep_warm()
    save_environment(name="a", image=image, warm=1)

    assert keep_warm() == 0
    assert pool(runtime) == {plain(): 1}

    for _ in range(8):
        factories.make_sandbox(node=node)
    assert keep_warm() == 0
    assert pool(runtime) == {}


@pytest.mark.parametrize("change", [{"draining": True}, {"name": "renamed"}])
def test_a_node_that_drains_or_is_not_there_keeps_none(
    runtime: FakeRuntime, image: Image, change: dict[str, Any]
) -> None:
    save_environment(name="a", image=image, warm=2)
    keep_warm()
    Node.objects.update(**change)

    assert keep_warm() == 0
    assert pool(runtime) == {}


def test_only_the_newest_version_counts(runtime: FakeRuntime, image: Image) -> None:
    save_environment(name="a", image=image, warm=2, workdir="/old")
    keep_warm()
    save_environment(name="a", image=image, warm=2, workdir="/new")

    assert keep_warm() == 2
    assert pool(runtime) == {plain("/new"): 2}

    save_environment(name="a", image=image, warm=0, workdir="/new")
    assert keep_warm() == 0
    assert pool(runtime) == {}


def layer_of(runtime: FakeRuntime, environment: Environment) -> str:
    """Make the layer that the environment's setup leaves."""
    spec = sandbox_spec(name="setup", environment=environment)
    handle = runtime.start(spec, timeout_seconds=60)
    key = environment_recipe(environment).key(base=base_key(runtime, spec, environment))
    return runtime.freeze(handle, key=key)


def test_one_whose_setup_was_not_run_yet_waits_for_it(runtime: FakeRuntime, image: Image) -> None:
    environment = save_environment(name="a", image=image, warm=2, setup="make", workdir="/a")
    save_environment(name="b", image=image, warm=1, workdir="/b")

    assert keep_warm() == 1
    assert pool(runtime) == {plain("/b"): 1}

    layer = layer_of(runtime, environment)
    assert keep_warm() == 2
    assert pool(runtime) == {plain("/b"): 1, ("/images/base", (layer,), "/a"): 2}


def test_a_start_that_fails_stops_neither_the_others_nor_the_next_round(
    runtime: FakeRuntime, image: Image
) -> None:
    save_environment(name="a", image=image, warm=2, workdir="/a")
    save_environment(name="b", image=image, warm=1, workdir="/b")
    runtime.fail_next("warm", StartFailed("no"), StartFailed("no"))

    assert keep_warm() == 1
    assert pool(runtime) == {plain("/b"): 1}
    assert keep_warm() == 2
    assert pool(runtime) == {plain("/a"): 2, plain("/b"): 1}


def test_an_image_that_is_missing_costs_its_own_environment_only(
    runtime: FakeRuntime, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_image(source: str) -> str:
        if source == "/images/missing":
            raise ImageMissing(f"no image {source}")
        return source

    monkeypatch.setattr(runtime, "find_image", find_image)
    missing = save_image(name="missing", source="/images/missing")
    save_environment(name="a", image=missing, warm=8)
    save_environment(name="b", image=image, warm=8)

    assert keep_warm() == 8
    assert pool(runtime) == {plain(): 8}


def test_one_that_cannot_be_ended_does_not_stop_the_rest(
    runtime: FakeRuntime, image: Image
) -> None:
    save_environment(name="a", image=image, warm=2, workdir="/old")
    keep_warm()
    save_environment(name="a", image=image, warm=1, workdir="/new")
    runtime.fail_next("stop", StopFailed("a process stays"))

    assert keep_warm() == 1
    assert pool(runtime) == {plain("/old"): 1, plain("/new"): 1}
    assert keep_warm() == 0
    assert pool(runtime) == {plain("/new"): 1}


def test_a_second_keeper_does_nothing(runtime: FakeRuntime, image: Image, tmp_path: Path) -> None:
    save_environment(name="a", image=image, warm=1)
    with (tmp_path / "warm.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        assert keep_warm() == 0
        assert (pool(runtime), runtime.calls) == ({}, [])

    assert keep_warm() == 1


def test_a_round_that_is_stopped_starts_no_more(runtime: FakeRuntime, image: Image) -> None:
    save_environment(name="a", image=image, warm=3)
    stop = threading.Event()
    stop.set()

    assert keep_warm(stop=stop) == 0
    assert pool(runtime) == {}


def test_the_nodes_way_to_keep_limits_is_written_down(runtime: FakeRuntime, node: Node) -> None:
    other = factories.make_node()

    assert tell_enforcement() is True

    node.refresh_from_db()
    other.refresh_from_db()
    assert node.enforcement == {
        "memory": "none",
        "cpu": "none",
        "processes": "none",
        "disk": "none",
    }
    assert other.enforcement == {}
    Node.objects.filter(pk=node.pk).delete()
    assert tell_enforcement() is False


class Noting(FakeRuntime):
    """A node in memory that tells when one was started ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Semaphore(0)

    def warm(self, spec: SandboxSpec, *, timeout_seconds: float) -> str:
        name = super().warm(spec, timeout_seconds=timeout_seconds)
        self.started.release()
        return name


def test_the_keeper_fills_again_what_a_start_took_until_it_is_closed(
    node: Node, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Noting()
    runtime.fail_next("warm", OSError("a fault that nobody foresaw"))
    for module in (warm, node_service):
        monkeypatch.setattr(module, "node_runtime", lambda: runtime)
    monkeypatch.setattr(warm, "ROUND_SECONDS", 3600.0)
    environment = save_environment(name="a", image=image, warm=1)
    keeper = WarmKeeper()
    keeper.start()
    try:
        warm.note_start()  # the first round ends with the fault; this begins the next
        while not runtime.started.acquire(timeout=0.05):
            warm.note_start()
        runtime.start(sandbox_spec(name="taken", environment=environment), timeout_seconds=60)
        warm.note_start()
        while not runtime.started.acquire(timeout=0.05):
            warm.note_start()
    finally:
        keeper.close()

    assert pool(runtime) == {plain(): 1}
    node.refresh_from_db()
    assert set(node.enforcement) == {"memory", "cpu", "processes", "disk"}
    assert not Sandbox.objects.exists()
    assert "warm-pool" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("stage", ["run", "eval", "control", None])
def test_only_the_init_worker_keeps_the_pool(
    runtime: FakeRuntime, image: Image, monkeypatch: pytest.MonkeyPatch, stage: str | None
) -> None:
    save_environment(name="a", image=image, warm=1)
    monkeypatch.setattr(worker, "_warm", None)
    monkeypatch.setattr(worker, "_stage", stage)
    worker._serve_node()
    assert worker._warm is None

    monkeypatch.setattr(worker, "_stage", "init")
    worker._serve_node()
    keeper = worker._warm
    worker._serve_node()

    assert isinstance(keeper, WarmKeeper)
    assert worker._warm is keeper
    keeper.close()
