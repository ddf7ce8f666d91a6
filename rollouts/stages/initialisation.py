"""INIT: start the sandbox in its reserved slot and run the environment's and the task's setup."""

import logging
from typing import Any

from rollouts.exceptions import InfraFault, LeaseLost
from rollouts.importers.base import decode_files
from rollouts.models import Rollout
from rollouts.services.claim import ensure_held
from rollouts.services.finish import finish_init
from rollouts.stages.database import database
from rollouts.stages.lease import Held
from sandboxes.models import Environment, Sandbox
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from sandboxes.services.lifecycle import find_sandbox, mark_ready, mark_starting
from sandboxes.services.node import node_runtime, sandbox_name, sandbox_spec
from sandboxes.states import SandboxPurpose

logger = logging.getLogger(__name__)

SETUP_OUTPUT_BYTES = 64 * 1024
SETUP_FOLDER = "/setup"


def carry_out_init(held: Held) -> None:
    """Carry out INIT. Raises LeaseLost and the faults of sandboxes."""
    claim = held.claim
    with database():
        rollout = Rollout.objects.select_related("environment__image", "group__task").get(
            pk=claim.rollout_id
        )
        sandbox = find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN)
    if rollout.needs_sandbox:
        if sandbox is None:
            raise InfraFault("The reserved sandbox was given up.", code="sandbox.given_up")
        task = rollout.group.task
        start_prepared_sandbox(
            sandbox=sandbox, environment=rollout.environment, payload=task.payload, held=held
        )
    with database():
        finish_init(claim=claim)


def start_prepared_sandbox(
    *,
    sandbox: Sandbox,
    environment: Environment,
    payload: dict[str, Any],
    held: Held,
    layers: tuple[str, ...] = (),
) -> SandboxHandle:
    """Start the instance of a sandbox row; with no layers given, run the setup in it.

    Raises LeaseLost when the sandbox was given up meanwhile, InfraFault when the setup fails,
    and the runtime's own faults; then the instance is removed by its row.
    """
    runtime = node_runtime()
    name = sandbox_name(sandbox.id)
    with database():
        ensure_held(claim=held.claim)
        if not mark_starting(sandbox_id=sandbox.id):
            raise LeaseLost(f"sandbox {sandbox.id} was given up")
    runtime.stop(name)
    handle = runtime.start(
        sandbox_spec(name=name, environment=environment, layers=layers),
        timeout_seconds=max(1.0, held.remaining_seconds()),
        cancelled=held.stopping,
    )
    with database():
        is_ready = mark_ready(sandbox_id=sandbox.id, handle=handle.as_dict())
    if not is_ready:
        runtime.stop(name)
        raise LeaseLost(f"sandbox {sandbox.id} was given up")
    if not layers:
        run_setup(runtime, handle, environment.setup, payload, held)
    return handle


def run_setup(
    runtime: Runtime,
    handle: SandboxHandle,
    environment_setup: str,
    payload: dict[str, Any],
    held: Held,
) -> None:
    """Run the environment's setup script, then the task's, with the task's files in /setup."""
    files = {
        f"{SETUP_FOLDER}/{path}": (content.data, content.mode)
        for path, content in decode_files(payload.get("files", {})).items()
    }
    scripts = {
        "environment": environment_setup,
        "task": payload.get("setup", ""),
    }
    wanted = {kind: text for kind, text in scripts.items() if text.strip()}
    if not wanted and not files:
        return
    for kind, text in wanted.items():
        files[f"{SETUP_FOLDER}/.{kind}-setup.sh"] = (text.encode(), 0o755)
    runtime.write_files(handle, files)
    for kind in wanted:
        result = runtime.exec(
            handle,
            ["bash", f"{SETUP_FOLDER}/.{kind}-setup.sh"],
            timeout_seconds=max(1.0, held.remaining_seconds()),
            output_bytes=SETUP_OUTPUT_BYTES,
            cancelled=held.stopping,
        )
        if result.exit_code != 0:
            output = (result.stdout + result.stderr).decode(errors="replace")[-2000:]
            how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
            raise InfraFault(
                f"The {kind}'s setup {how}: {output}",
                code="sandbox.setup_failed",
                timed_out=result.timed_out,
            )
    runtime.exec(handle, ["rm", "-rf", SETUP_FOLDER], cwd="/", timeout_seconds=60)
