"""INIT: start the sandbox in its reserved slot, on what its setups left."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from rollouts.exceptions import InfraFault, LeaseLost
from rollouts.importers.base import decode_files
from rollouts.models import Rollout
from rollouts.services.claim import ensure_held
from rollouts.services.finish import finish_init
from rollouts.services.secrets import check_secrets, resolve_secrets
from rollouts.stages.database import database
from rollouts.stages.lease import Held
from rollouts.stages.network import reachable
from sandboxes.models import Environment, Sandbox
from sandboxes.runtime.protocol import Runtime, SandboxHandle, SandboxSpec
from sandboxes.services.image_work import ensure_image
from sandboxes.services.lifecycle import find_sandbox, mark_ready, mark_starting
from sandboxes.services.node import node_runtime, sandbox_name, sandbox_spec
from sandboxes.services.preparation import (
    Deadline,
    Layers,
    Recipe,
    environment_recipe,
    prepare_layers,
)
from sandboxes.services.warm import note_start
from sandboxes.setup_files import read_files
from sandboxes.states import SandboxPurpose

logger = logging.getLogger(__name__)


def carry_out_init(held: Held) -> None:
    """Carry out INIT. Raises LeaseLost and the faults of sandboxes."""
    claim = held.claim
    with database():
        rollout = Rollout.objects.select_related(
            "environment__image", "group__task", "group__snapshot"
        ).get(pk=claim.rollout_id)
        sandbox = find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN)
    check_secrets(rollout.environment)
    if rollout.needs_sandbox:
        if sandbox is None:
            raise InfraFault("The reserved sandbox was given up.", code="sandbox.given_up")
        snapshot = rollout.group.snapshot
        start_prepared_sandbox(
            sandbox=sandbox,
            environment=rollout.environment,
            payload=rollout.group.task.payload,
            held=held,
            layers=None if snapshot is None else tuple(snapshot.layers),
        )
    with database():
        finish_init(claim=claim)


def start_prepared_sandbox(
    *,
    sandbox: Sandbox,
    environment: Environment,
    payload: dict[str, Any],
    held: Held,
    layers: Layers | None = None,
    hidden: tuple[str, ...] = (),
    closed: bool = False,
) -> SandboxHandle:
    """Start the instance of a sandbox row on the given layers, or on those of its setups.

    `hidden` are folders at the root that begin empty; a `closed` sandbox has no network, whatever
    its environment says, though its setups had one.

    Setups run once on a node and are shared. Raises LeaseLost when the sandbox was given up
    meanwhile, SetupFailed, and the runtime's own faults; then the instance is removed by its row.
    """
    runtime = node_runtime()
    name = sandbox_name(sandbox.id)
    with database():
        ensure_held(claim=held.claim)
        if not mark_starting(sandbox_id=sandbox.id):
            raise LeaseLost(f"sandbox {sandbox.id} was given up")
    runtime.stop(name)
    if layers:
        # The very image that the layers were written on: a tag may have moved meanwhile.
        spec = replace(
            sandbox_spec(name=name, environment=environment), image=runtime.layer_image(layers[0])
        )
    else:
        _get_image(environment, held)
        spec = sandbox_spec(name=name, environment=environment)
    if layers is None:
        layers = prepare_layers(
            runtime,
            spec,
            [environment_recipe(environment), task_recipe(payload, environment)],
            environment=environment,
            start=partial(_start, runtime, spec, held),
            network=partial(reachable, environment=environment),
            deadline=Deadline(remaining_seconds=held.remaining_seconds, cancelled=held.stopping),
            resolve=resolve_secrets,
        )
    spec = replace(
        spec,
        # Not for the environment's own setup, which may hold secrets: bash runs what BASH_ENV says.
        env={**spec.env, **payload.get("env", {})},
        hidden=hidden,
        network="none" if closed else spec.network,
    )
    handle = _start(runtime, spec, held, layers)
    with database():
        is_ready = mark_ready(sandbox_id=sandbox.id, handle=handle.as_dict(), layers=layers)
    if not is_ready:
        runtime.stop(name)
        raise LeaseLost(f"sandbox {sandbox.id} was given up")
    return handle


def task_recipe(payload: dict[str, Any], environment: Environment) -> Recipe:
    """Return a task's own setup, with its files and its environment's; of one path its own."""
    script = payload.get("setup", "")
    files = decode_files(payload.get("files", {}))
    shared = read_files(environment.files) if script.strip() else {}
    own = {path: (content.data, content.mode) for path, content in files.items()}
    return Recipe(
        kind="task", script=script, files={**shared, **own}, env=dict(payload.get("env", {}))
    )


def _get_image(environment: Environment, held: Held) -> None:
    """Pull or build the environment's image where this node has it not yet."""
    if environment.image is not None:
        ensure_image(
            image=environment.image,
            timeout_seconds=held.remaining_seconds(),
            cancelled=held.stopping,
        )


def _start(runtime: Runtime, spec: SandboxSpec, held: Held, layers: Layers) -> SandboxHandle:
    handle = runtime.start(
        replace(spec, layers=layers),
        timeout_seconds=max(1.0, held.remaining_seconds()),
        cancelled=held.stopping,
    )
    note_start()
    return handle
