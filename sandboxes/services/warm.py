"""The warm pool of this node: sandboxes started ahead, so that a rollout need not wait for one."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from django.conf import settings

from sandboxes.models import Environment, Node
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.locks import try_lock
from sandboxes.runtime.protocol import Runtime, SandboxSpec
from sandboxes.runtime.warm import shape
from sandboxes.services.connections import release_connection
from sandboxes.services.node import node_runtime, sandbox_spec
from sandboxes.services.preparation import environment_recipe, find_layers

logger = logging.getLogger(__name__)

LIFETIME_SECONDS = 1800.0  # of one that nobody takes: another replaces it
START_SECONDS = 60.0
ROUND_SECONDS = 5.0

_started = threading.Event()


def note_start() -> None:
    """Say that a sandbox was started: the pool may have one less."""
    _started.set()


class WarmKeeper:
    """Keep the pool filled from a thread of the INIT worker until `close`."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="warm-pool", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the present round; what was started ahead goes on for the next worker."""
        self._closing.set()
        _started.set()
        self._thread.join()

    def _loop(self) -> None:
        told = False
        while True:
            _started.clear()
            if self._closing.is_set():
                return
            try:
                told = told or tell_enforcement()
                keep_warm(stop=self._closing)
            except Exception:
                logger.exception("the warm pool could not be kept; the next round tries again")
            finally:
                release_connection()
            _started.wait(ROUND_SECONDS)


def tell_enforcement() -> bool:
    """Write down how this node keeps each limit; False while the node has no row yet."""
    kept = node_runtime().enforcement()
    return bool(Node.objects.filter(name=settings.NODE_NAME).update(enforcement=kept))


def keep_warm(*, stop: threading.Event | None = None) -> int:
    """Start what this node's pool lacks and end what it has too much; return how many started.

    One process of the node at a time; the others do nothing.
    """
    with _only_keeper() as alone:
        if not alone:
            return 0
        wanted = _wanted()
        release_connection()
        runtime = node_runtime()
        present: Counter[tuple[object, ...]] = Counter()
        for name, spec in runtime.list_warm().items():
            key = shape(spec)
            if present[key] < wanted.get(key, (0, spec))[0]:
                present[key] += 1
            else:
                _stop(runtime, name)
        started = 0
        for key, (count, spec) in wanted.items():
            for _ in range(count - present[key]):
                if stop is not None and stop.is_set():
                    return started
                started += _start(runtime, spec)
        return started


def _wanted() -> dict[tuple[object, ...], tuple[int, SandboxSpec]]:
    """Return how many of which shape, within what the node has room for."""
    node = Node.objects.with_slots_used().filter(name=settings.NODE_NAME, draining=False).first()
    if node is None:
        return {}
    room = node.capacity - int(getattr(node, "slots_used", 0))
    environments = list(
        Environment.objects.latest_versions()
        .filter(warm__gt=0, image__isnull=False)
        .select_related("image")
        .order_by("name")
    )
    release_connection()
    runtime = node_runtime()
    wanted: dict[tuple[object, ...], tuple[int, SandboxSpec]] = {}
    for environment in environments:
        spec = sandbox_spec(name="warm", environment=environment)
        try:
            layers = find_layers(
                runtime, spec, [environment_recipe(environment)], environment=environment
            )
            if layers is None:  # its first rollout makes them
                continue
            limits = replace(spec.limits, lifetime_seconds=LIFETIME_SECONDS)
            spec = replace(spec, layers=layers, limits=limits, image=runtime.find_image(spec.image))
        except SandboxFault as fault:
            logger.warning("no warm sandboxes of %s: %s", environment.ref, fault)
            continue
        count = max(0, min(environment.warm, room))
        already, _ = wanted.get(shape(spec), (0, spec))
        wanted[shape(spec)] = (already + count, spec)
        room -= count
    return wanted


def _start(runtime: Runtime, spec: SandboxSpec) -> int:
    try:
        runtime.warm(spec, timeout_seconds=START_SECONDS)
    except SandboxFault as fault:
        logger.warning("a sandbox could not be started ahead: %s", fault)
        return 0
    return 1


def _stop(runtime: Runtime, name: str) -> None:
    try:
        runtime.stop(name)
    except SandboxFault:
        logger.exception("warm sandbox %s could not be ended; the next round tries again", name)


@contextmanager
def _only_keeper() -> Iterator[bool]:
    descriptor = try_lock(settings.SANDBOX_ROOT / "warm.lock")
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)
