"""Carry out one phase of a grading: a fresh sandbox, files in, commands, files out."""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from evaluators.base import (
    Base,
    EvaluatorCancelled,
    EvaluatorCrashed,
    EvaluatorFault,
    EvaluatorTimeout,
    Phase,
    PhaseResult,
    Ran,
)
from rollouts.exceptions import InfraFault, StageTimeout
from rollouts.importers.base import decode_files
from rollouts.models import Rollout
from rollouts.stages.initialisation import start_prepared_sandbox
from rollouts.stages.lease import Held
from rollouts.stages.network import NO_ENV, reachable
from rollouts.states import StopReason
from sandboxes.models import Environment, Sandbox
from sandboxes.runtime.exceptions import (
    EnterFailed,
    FileFault,
    FileMissing,
    ImageUnusable,
    OutputTooLarge,
    SandboxFault,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.layout import PREPARED
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.services.node import node_runtime, sandbox_name
from sandboxes.services.preparation import Layers
from sandboxes.states import Network

logger = logging.getLogger(__name__)

LOG_BYTES = 256 * 1024
COLLECTED_BYTES = 16 * 1024 * 1024  # of all phases of a grading together
COLLECT_SECONDS = 60.0
MINIMUM_SECONDS = 1.0
SCORING_SECONDS = 10.0  # at least, for one answer: a process starts for each
# Whatever the agent left there, links and old rewards included: no program of its own is asked.
HIDDEN = ("/tests", "/logs", "/solution")
_TAIL = '[ -f "$1" ] && exec tail -c "$2" -- "$1"'
# What an agent can bring about by breaking its system: no shell, no tar, no working directory.
_BROKEN = (StartFailed, EnterFailed, FileFault, ImageUnusable)


class GradingBroken(EvaluatorFault):
    """Say that the sandbox which the agent left could not be started or entered for its tests."""

    code = "evaluator.broken_sandbox"


class SandboxOverLimit(EvaluatorFault):
    """Say that the agent's sandbox ended at its limit, so that there is nothing to test."""

    code = "sandbox.over_limit"


class GradingOverLimit(EvaluatorFault):
    """Say that the tests used more memory, disk or time than their sandbox may have."""

    code = "evaluator.over_limit"


@dataclass(frozen=True)
class Grading:
    """What is graded, and by what; seconds bound each command, and all commands of a grading."""

    rollout: Rollout
    environment: Environment
    evaluator: str
    settings: dict[str, Any]
    payload: dict[str, Any]
    tests: dict[str, Any]
    test_seconds: float
    grading_seconds: float
    frozen: Sandbox | None
    sandbox: Sandbox | None


class Bench:
    """Carry out the phases of one grading in turn, each in the one sandbox that is reserved.

    `untouched` has what the agent left replaced by what it began with.
    """

    def __init__(self, held: Held, grading: Grading, *, untouched: bool) -> None:
        self._held = held
        self._grading = grading
        self._untouched = untouched
        self._left = grading.grading_seconds
        self._bytes_left = COLLECTED_BYTES
        self._cut: dict[tuple[str, ...], Layers] = {}

    def seconds(self) -> float:
        """Return what the next command may take; all of a grading's share one allowance.

        Another grading has as much again. Raises EvaluatorTimeout when the allowance is used up,
        StageTimeout when the stage's time is.
        """
        remaining = self._remaining()
        if self._left < MINIMUM_SECONDS:
            allowed = self._grading.grading_seconds
            raise EvaluatorTimeout(f"the tests did not end within {allowed:g} seconds in all")
        return min(self._grading.test_seconds, self._left, remaining)

    def scoring_seconds(self) -> float:
        """Return what the evaluator may take for one answer. Raises StageTimeout."""
        return min(max(self._left, SCORING_SECONDS), self._remaining())

    def _remaining(self) -> float:
        remaining = self._held.remaining_seconds()
        if remaining < MINIMUM_SECONDS:
            raise StageTimeout("EVAL used up its budget.", code="eval.timeout")
        return remaining

    def run(self, phase: Phase) -> PhaseResult:
        """Carry out a phase; what breaks on the agent's work twice is a fault of the grading."""
        if self._grading.sandbox is None:
            raise _not_here("There is no sandbox for the tests.")
        try:
            return self._try(phase, self._grading.sandbox)
        except _BROKEN as first:
            if self._untouched or self._held.stopping():
                raise
            # Once more, so that no passing weakness of the node is held against the policy.
            logger.info("rollout %s is tested again: %s", self._grading.rollout.id, first)
        try:
            return self._try(phase, self._grading.sandbox)
        except _BROKEN as again:
            raise GradingBroken(f"what the agent left cannot be tested: {again}") from again

    def close(self) -> None:
        """End the sandbox and discard the layers that were made for it.

        A worker that holds the rollout no longer leaves them to the sweep: another may have its
        own sandbox of this name by now.
        """
        made = [ref for layers in self._cut.values() for ref in layers if not _is_prepared(ref)]
        self._cut.clear()
        if not made or self._grading.sandbox is None or self._held.stopping():
            return
        runtime = node_runtime()
        try:
            runtime.stop(sandbox_name(self._grading.sandbox.id))
            for reference in made:
                runtime.discard_layer(reference)
        except SandboxFault:
            logger.exception("layers of rollout %s are left to the sweep", self._grading.rollout.id)

    def _try(self, phase: Phase, sandbox: Sandbox) -> PhaseResult:
        environment, has_network = self._grading.environment, self._has_network(phase)
        layers = self._layers(phase)
        try:
            handle = start_prepared_sandbox(
                sandbox=sandbox,
                environment=environment,
                payload=self._grading.rollout.group.task.payload,
                held=self._held,
                layers=layers,
                hidden=HIDDEN,
                closed=not has_network,
            )
            with ExitStack() as stack:
                env = NO_ENV
                if has_network:
                    env = stack.enter_context(reachable(handle, environment=environment))
                return self.carry_out(phase, handle, env)
        except SandboxGone as gone:
            if gone.limit is None:
                raise InfraFault(str(gone), code=gone.code) from gone
            raise GradingOverLimit(f"the tests ended with their sandbox: {gone}") from gone

    def _has_network(self, phase: Phase) -> bool:
        if not phase.network:
            return False
        if self._grading.environment.network == Network.NONE:
            raise InfraFault(
                f"The tests want a network and environment {self._grading.environment.ref} has "
                "none: give the environment one, or take `network` out of the evaluator's "
                "settings.",
                code="evaluator.no_network",
                retryable=False,
            )
        return True

    def _layers(self, phase: Phase) -> Layers | None:
        """Return what a phase starts on; None: what the setups left.

        Raises SandboxOverLimit when the agent left nothing by its own doing, InfraFault otherwise.
        """
        rollout, frozen = self._grading.rollout, self._grading.frozen
        snapshot = rollout.group.snapshot
        began_on = () if snapshot is None else tuple(snapshot.layers)
        if phase.base is Base.PREPARED:
            self.close()  # its row will own other layers, and the sweep deletes what none owns
            return tuple(filter(_is_prepared, began_on)) or None
        over_limit = rollout.stop_reason == StopReason.SANDBOX_LIMIT
        if over_limit and not self._untouched:
            raise SandboxOverLimit("the agent's sandbox ended at its limit of memory or disk")
        if not over_limit and (frozen is None or not frozen.frozen_layer):
            raise _not_here("What the agent left is not on this node.")
        if frozen is None or self._untouched:
            return self._within(phase, began_on) or None
        return self._within(phase, (frozen.frozen_layer, *frozen.layers))

    def _within(self, phase: Phase, layers: Layers) -> Layers:
        """Return layers with the phase's workspace of what was written, and nothing else of it."""
        folders = phase.workspace or (self._grading.environment.workdir,)
        is_whole = any(not folder.strip("/") for folder in folders)
        if is_whole or all(map(_is_prepared, layers)):
            return layers
        if folders not in self._cut:
            self.close()
            began = time.monotonic()
            try:
                self._cut[folders] = node_runtime().cut_layers(
                    layers, folders=folders, sealed=HIDDEN
                )
            finally:  # what an agent piles up in its folders must not cost its grading the stage
                self._held.extend(time.monotonic() - began)
        return self._cut[folders]

    def carry_out(self, phase: Phase, handle: SandboxHandle, env: Mapping[str, str]) -> PhaseResult:
        """Work in the started sandbox of a phase; raises SandboxGone and the runtime's faults."""
        files = dict(phase.files)
        if phase.tests:
            files |= {
                f"/tests/{path}": (content.data, content.mode)
                for path, content in decode_files(self._grading.tests).items()
            }
        try:
            node_runtime().write_files(handle, files)
        except ValueError as wrong:
            raise EvaluatorCrashed(f"phase {phase.name!r} cannot be carried out: {wrong}") from None
        ran = self._run_commands(phase, handle, env)
        collected = {path: self._read(handle, path, most) for path, most in phase.collect.items()}
        if phase.log:
            collected[phase.log] = self._tail(handle, phase.log)
        return PhaseResult(name=phase.name, commands=ran, files=collected)

    def _run_commands(
        self, phase: Phase, handle: SandboxHandle, env: Mapping[str, str]
    ) -> tuple[Ran, ...]:
        ran: list[Ran] = []
        for command in phase.commands:
            left = self.seconds()
            seconds = left if command.seconds is None else min(command.seconds, left)
            result = node_runtime().exec(
                handle,
                command.argv,
                stdin=command.stdin,
                env={**env, **command.env},
                cwd=command.cwd,
                timeout_seconds=seconds,
                output_bytes=command.output_bytes,
                cancelled=self._held.stopping,
            )
            self._left -= result.duration_seconds
            if result.cancelled or self._held.stopping():
                raise EvaluatorCancelled("the tests were cancelled")
            if result.timed_out and (command.seconds is None or command.seconds > left):
                said = result.stdout + result.stderr
                said += (phase.log and self._tail(handle, phase.log)) or b""
                raise EvaluatorTimeout(
                    f"the tests did not end within {seconds:g} seconds",
                    log=said.decode(errors="replace"),
                )
            ran.append(
                Ran(
                    exit_code=result.exit_code,
                    stdout=result.stdout,
                    stderr=result.stderr,
                    seconds=round(result.duration_seconds, 4),
                    timed_out=result.timed_out,
                    truncated=result.truncated,
                )
            )
        return tuple(ran)

    def _read(self, handle: SandboxHandle, path: str, most: int) -> bytes | None:
        """Return a collected file, or a folder as an archive; b"" where that cannot be."""
        most = min(most, self._bytes_left)
        try:
            if path.endswith("/"):
                found = _archive(handle, path, most)
            else:
                found = node_runtime().read_file(handle, path, max_bytes=most)
        except FileMissing:
            return None
        except (OutputTooLarge, FileFault, ValueError):
            return b""
        self._bytes_left -= len(found or b"")
        return found

    def _tail(self, handle: SandboxHandle, path: str) -> bytes | None:
        try:
            result = node_runtime().exec(
                handle,
                ["/bin/sh", "-c", _TAIL, "sh", path, str(LOG_BYTES)],
                cwd="/",
                timeout_seconds=COLLECT_SECONDS,
                output_bytes=LOG_BYTES,
            )
        except SandboxGone:
            raise
        except SandboxFault:
            return None
        return result.stdout if result.exit_code == 0 else None


def _archive(handle: SandboxHandle, path: str, most: int) -> bytes | None:
    """Return a folder as a tar archive, b"" when it is too large, None when it is none."""
    result = node_runtime().exec(
        handle,
        ["tar", "-c", "-f", "-", "-C", path, "."],
        cwd="/",
        timeout_seconds=COLLECT_SECONDS,
        output_bytes=most,
    )
    if result.truncated or result.timed_out:
        return b""
    return result.stdout if result.exit_code == 0 else None


def _is_prepared(reference: str) -> bool:
    return reference.startswith(PREPARED)


def _not_here(what: str) -> InfraFault:
    return InfraFault(what, code="sandbox.layer_missing", restart_from_init=True)
