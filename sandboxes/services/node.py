"""This node's runtime: one per process, and the removal of what nothing owns."""

import logging
import os
import threading
import time
from typing import cast
from uuid import UUID

from django.conf import settings
from django.db.models import F

from sandboxes.models import Environment, Node, Sandbox, Snapshot
from sandboxes.runtime.argv import Overlay
from sandboxes.runtime.exceptions import ImageMissing, SandboxFault
from sandboxes.runtime.factory import RuntimeKind, make_runtime
from sandboxes.runtime.layout import WARM
from sandboxes.runtime.protocol import Gpu, Limits, Runtime, SandboxSpec
from sandboxes.services.connections import release_connection
from sandboxes.services.image_store import find_on_node
from sandboxes.services.images import image_spec
from sandboxes.services.lifecycle import mark_gone
from sandboxes.states import SandboxState

logger = logging.getLogger(__name__)

_runtimes: dict[int, Runtime] = {}
_lock = threading.Lock()
_sweeping = threading.Lock()
_unowned_layers: dict[str, float] = {}

LAYER_GRACE_SECONDS = 120.0


def node_runtime() -> Runtime:
    """Return the runtime of this process; a forked process gets one of its own."""
    with _lock:
        runtime = _runtimes.get(os.getpid())
        if runtime is None:
            runtime = make_runtime(
                cast("RuntimeKind", settings.SANDBOX_RUNTIME),
                root=settings.SANDBOX_ROOT,
                prefix=sandbox_prefix(),
                account=settings.SANDBOX_ACCOUNT if os.geteuid() == 0 else None,
                groups=settings.SANDBOX_CGROUPS,
                engine=settings.SANDBOX_ENGINE,
                overlay=cast("Overlay", settings.SANDBOX_OVERLAY),
            )
            _runtimes.clear()
            _runtimes[os.getpid()] = runtime
    return runtime


def close_node_runtime() -> None:
    """Let go of this process's runtime; sandboxes go on running."""
    with _lock:
        runtime = _runtimes.pop(os.getpid(), None)
    if runtime is not None:
        runtime.close()


def sandbox_prefix() -> str:
    """Return the prefix of all instance names of this deployment."""
    return f"prorl-{settings.DEPLOYMENT}-"


def sandbox_name(sandbox_id: UUID) -> str:
    """Return the instance's name of a sandbox row."""
    return f"{sandbox_prefix()}{sandbox_id.hex}"


def sandbox_spec(
    *, name: str, environment: Environment, layers: tuple[str, ...] = ()
) -> SandboxSpec:
    """Return how a sandbox of an environment is started. Raises ImageMissing."""
    if environment.image is None:
        raise ImageMissing(f"Environment {environment.ref} names no image.")
    limits = environment.limits
    return SandboxSpec(
        name=name,
        image=find_on_node(image=environment.image) or image_spec(environment.image).source,
        layers=layers,
        network="host" if environment.network == "host" else "none",
        gpu=cast("Gpu", environment.gpu),
        limits=Limits(
            memory_bytes=limits.get("memory_bytes"),
            cpus=limits.get("cpus"),
            processes=limits.get("processes"),
            disk_bytes=limits.get("disk_bytes"),
            lifetime_seconds=limits.get("lifetime_seconds", settings.STAGE_LIMIT_SECONDS * 3),
        ),
        workdir=environment.workdir,
    )


def remove_given_up(*, owner: UUID | None = None) -> int:
    """Remove this node's sandboxes that were given up, of one owner or of all; return how many.

    By name, and idempotent: any number of processes of the node may do it at once.
    """
    given_up = Sandbox.objects.filter(state=SandboxState.STOPPING, node__name=settings.NODE_NAME)
    if owner is not None:
        given_up = given_up.of(owner)
    return sum(_remove(sandbox) for sandbox in list(given_up))


def _remove(sandbox: Sandbox) -> bool:
    """Remove one sandbox; no database connection is held while the runtime works."""
    release_connection()
    runtime = node_runtime()
    try:
        runtime.stop(sandbox_name(sandbox.id))
        if sandbox.frozen_layer:
            runtime.discard_layer(sandbox.frozen_layer)
    except SandboxFault:
        logger.exception("sandbox %s could not be removed; the sweep tries again", sandbox.id)
        return False
    return mark_gone(sandbox_id=sandbox.id)


def sweep_node() -> int:
    """Remove given-up sandboxes, then every instance of ours that no present row owns."""
    if not _sweeping.acquire(blocking=False):
        return 0
    try:
        removed = remove_given_up()
        release_connection()
        runtime = node_runtime()
        names = set(runtime.list())
        owned = {
            sandbox_name(pk)
            for pk in Sandbox.objects.present()
            .filter(node__name=settings.NODE_NAME)
            .values_list("pk", flat=True)
        }
        release_connection()
        leaked = 0
        for name in sorted(names - owned):
            logger.warning("instance %s belongs to nobody: removed", name)
            try:
                runtime.stop(name)
            except SandboxFault:
                logger.exception("instance %s could not be removed", name)
                continue
            removed += 1
            leaked += not name.startswith(f"{sandbox_prefix()}{WARM}")
        if leaked:
            Node.objects.filter(name=settings.NODE_NAME).update(leaked=F("leaked") + leaked)
            release_connection()
        removed += _stop_unguarded(runtime) + _sweep_layers(runtime)
        try:
            runtime.sweep()
        except SandboxFault:
            logger.exception("what killed removals left could not be removed")
        return removed + runtime.evict_layers(keep_bytes=settings.LAYER_CACHE_BYTES)
    finally:
        _sweeping.release()


def _stop_unguarded(runtime: Runtime) -> int:
    """Stop sandboxes that nothing holds to their lifetime and limits any more."""
    stopped = 0
    for name in runtime.unguarded():
        logger.warning("instance %s lost its watchdog: stopped", name)
        try:
            runtime.stop(name)
        except SandboxFault:
            logger.exception("instance %s could not be removed", name)
            continue
        stopped += 1
    return stopped


def _sweep_layers(runtime: Runtime) -> int:
    """Discard frozen layers that no present row has named for a while.

    A layer is there a moment before its row says so; hence the grace.
    """
    layers = set(runtime.list_layers())
    owned = set(
        Sandbox.objects.present().exclude(frozen_layer="").values_list("frozen_layer", flat=True)
    )
    # A snapshot may be of another's snapshot: every layer of its chain stays.
    for chain in Snapshot.objects.ready().values_list("layers", flat=True):
        owned.update(chain)
    for chain in Sandbox.objects.present().values_list("layers", flat=True):
        owned.update(chain)
    release_connection()
    now = time.monotonic()
    for known in list(_unowned_layers):
        if known not in layers - owned:
            del _unowned_layers[known]
    discarded = 0
    for layer in sorted(layers - owned):
        if now - _unowned_layers.setdefault(layer, now) >= LAYER_GRACE_SECONDS:
            logger.warning("layer %s belongs to nobody: removed", layer)
            runtime.discard_layer(layer)
            discarded += 1
    return discarded


def remove_everything() -> int:
    """Remove every instance and layer of this deployment from this node, in use or not.

    For the end of a stack: workers must be stopped. Rollouts in a stage start again at INIT.
    """
    runtime = node_runtime()
    names = [*runtime.list(), *runtime.list_warm()]
    for name in names:
        runtime.stop(name)
    here = list(Sandbox.objects.present().filter(node__name=settings.NODE_NAME))
    for sandbox in here:
        if sandbox.frozen_layer:
            release_connection()
            runtime.discard_layer(sandbox.frozen_layer)
        mark_gone(sandbox_id=sandbox.id)
    return len(names)
