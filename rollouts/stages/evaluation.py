"""EVAL: score a rollout, and find out whose fault it is when no score comes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluators.base import Artefacts, EvaluatorCancelled, EvaluatorFault, EvaluatorTimeout, Score
from evaluators.registry import get_evaluator
from evaluators.runner import score
from rollouts.exceptions import InfraFault, StageTimeout
from rollouts.importers.base import decode_files
from rollouts.models import Rollout
from rollouts.options import Budgets
from rollouts.services.finish import EvalResult, finish_eval
from rollouts.stages.database import database
from rollouts.stages.initialisation import start_prepared_sandbox
from rollouts.stages.lease import Held
from rollouts.stages.network import reachable
from rollouts.states import StopReason
from sandboxes.models import Sandbox
from sandboxes.runtime.exceptions import (
    EnterFailed,
    FileFault,
    FileMissing,
    ImageUnusable,
    OutputTooLarge,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from sandboxes.services.lifecycle import find_sandbox
from sandboxes.services.node import node_runtime
from sandboxes.services.preparation import Layers
from sandboxes.states import SandboxPurpose

logger = logging.getLogger(__name__)

REWARD_FILE_BYTES = 64 * 1024
TEST_LOG_BYTES = 256 * 1024
LOG_CHARACTERS = 100_000
MINIMUM_SECONDS = 1.0
# Whatever the agent left there, links and old rewards included: no program of its own is asked.
HIDDEN = ("/tests", "/logs", "/solution")
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
class _Grading:
    """What is graded, and by what."""

    rollout: Rollout
    evaluator: str
    settings: dict[str, Any]
    payload: dict[str, Any]
    tests: dict[str, Any]
    test_seconds: float
    grading_seconds: float
    frozen: Sandbox | None
    sandbox: Sandbox | None


def carry_out_eval(held: Held) -> None:
    """Carry out EVAL. Raises LeaseLost, and InfraFault when the grading itself is broken."""
    with database():
        grading = _load(held)
    try:
        found = _grade(held, grading, untouched=False)
    except EvaluatorCancelled:
        raise
    except EvaluatorFault as fault:
        found = _whose_fault(held, grading, fault)
    with database():
        finish_eval(
            claim=held.claim,
            result=EvalResult(
                evaluator=grading.evaluator,
                reward=found.reward,
                rewards=dict(found.rewards),
                details=dict(found.details),
                log=found.log[-LOG_CHARACTERS:],
            ),
        )


def _load(held: Held) -> _Grading:
    rollout = Rollout.objects.select_related(
        "environment__image", "group__task", "group__snapshot", "experiment"
    ).get(pk=held.claim.rollout_id)
    task, environment = rollout.group.task, rollout.environment
    hidden = task.hidden
    evaluator = hidden.get("evaluator") or environment.evaluator
    # Another evaluator than the environment's would refuse the environment's settings.
    inherited = environment.evaluator_settings if evaluator == environment.evaluator else {}
    return _Grading(
        rollout=rollout,
        evaluator=evaluator,
        settings={**inherited, **hidden.get("evaluator_settings", {})},
        payload=hidden.get("evaluator_payload", {}),
        tests=hidden.get("tests", {}),
        test_seconds=float(task.payload.get("verifier_timeout_seconds") or 600.0),
        grading_seconds=Budgets.stored(rollout.experiment.budgets).eval_seconds,
        frozen=find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN),
        sandbox=find_sandbox(owner=rollout.id, purpose=SandboxPurpose.GRADE),
    )


def _whose_fault(held: Held, grading: _Grading, fault: EvaluatorFault) -> Score:
    """Grade the untouched layer: when that works, the policy broke its grading and pays for it."""
    if held.stopping():
        raise fault
    try:
        _grade(held, grading, untouched=True)
    except EvaluatorFault as own:
        raise InfraFault(
            f"The evaluator fails on the untouched sandbox too: {own} (first: {fault})",
            code=own.code,
        ) from fault
    reward = grading.rollout.experiment.failure_reward
    logger.info("rollout %s broke its own grading: %s", grading.rollout.id, fault.code)
    return Score(
        reward=reward,
        rewards={"reward": reward},
        details={"policy_fault": fault.code, "message": str(fault)[:2000]},
        log=fault.log,
    )


def _grade(held: Held, grading: _Grading, *, untouched: bool) -> Score:
    if get_evaluator(grading.evaluator).needs_sandbox:
        artefacts = _run_tests(held, grading, untouched=untouched)
    elif untouched:
        artefacts = Artefacts()
    else:
        artefacts = Artefacts(
            answer=grading.rollout.answer, last_message=grading.rollout.last_message
        )
    return score(
        grading.evaluator,
        grading.settings,
        grading.payload,
        artefacts,
        timeout_seconds=_seconds(held, grading),
        cancelled=held.stopping,
    )


def _seconds(held: Held, grading: _Grading) -> float:
    """Return what one step of one grading may take; the untouched grading has as much again."""
    remaining = held.remaining_seconds()
    if remaining < MINIMUM_SECONDS:
        raise StageTimeout("EVAL used up its budget.", code="eval.timeout")
    return min(grading.test_seconds, grading.grading_seconds, remaining)


def _run_tests(held: Held, grading: _Grading, *, untouched: bool) -> Artefacts:
    """Run the hidden tests in a fresh sandbox over the agent's frozen layer, or without it."""
    layers = _layers(grading, untouched=untouched)
    if grading.sandbox is None:
        raise _not_here("There is no sandbox for the tests.")
    try:
        return _try_tests(held, grading, grading.sandbox, layers)
    except _BROKEN as first:
        if untouched or held.stopping():
            raise
        # Once more, so that no passing weakness of the node is held against the policy.
        logger.info("rollout %s is tested again: %s", grading.rollout.id, first)
    try:
        return _try_tests(held, grading, grading.sandbox, layers)
    except _BROKEN as again:
        raise GradingBroken(f"what the agent left cannot be tested: {again}") from again


def _try_tests(held: Held, grading: _Grading, sandbox: Sandbox, layers: Layers | None) -> Artefacts:
    try:
        handle = start_prepared_sandbox(
            sandbox=sandbox,
            environment=grading.rollout.environment,
            payload=grading.rollout.group.task.payload,
            held=held,
            layers=layers,
            hidden=HIDDEN,
        )
        with reachable(handle, environment=grading.rollout.environment) as env:
            return _tested(held, grading, handle, env)
    except SandboxGone as gone:
        if gone.limit is None:
            raise InfraFault(str(gone), code=gone.code) from gone
        raise GradingOverLimit(f"the tests ended with their sandbox: {gone}") from gone


def _layers(grading: _Grading, *, untouched: bool) -> Layers | None:
    """Return what the grading starts on; None: what the setups left.

    Raises SandboxOverLimit when the agent left nothing by its own doing, InfraFault otherwise.
    """
    over_limit = grading.rollout.stop_reason == StopReason.SANDBOX_LIMIT
    if over_limit and not untouched:
        raise SandboxOverLimit("the agent's sandbox ended at its limit of memory or disk")
    frozen = grading.frozen
    if not over_limit and (frozen is None or not frozen.frozen_layer):
        raise _not_here("What the agent left is not on this node.")
    if frozen is not None and not untouched:
        return (frozen.frozen_layer, *frozen.layers)
    snapshot = grading.rollout.group.snapshot
    return None if snapshot is None else tuple(snapshot.layers)


def _not_here(what: str) -> InfraFault:
    return InfraFault(what, code="sandbox.layer_missing", restart_from_init=True)


def _tested(
    held: Held, grading: _Grading, handle: SandboxHandle, env: Mapping[str, str]
) -> Artefacts:
    runtime = node_runtime()
    files = {
        f"/tests/{path}": (content.data, content.mode)
        for path, content in decode_files(grading.tests).items()
    }
    runtime.write_files(handle, {**files, "/logs/verifier/.keep": (b"", 0o644)})
    seconds = _seconds(held, grading)
    result = runtime.exec(
        handle,
        ["bash", "/tests/test.sh"],
        env=env,
        timeout_seconds=seconds,
        output_bytes=TEST_LOG_BYTES,
        cancelled=held.stopping,
    )
    log = (result.stdout + result.stderr).decode(errors="replace")
    if result.cancelled or held.stopping():
        raise EvaluatorCancelled("the tests were cancelled")
    if result.timed_out:
        raise EvaluatorTimeout(f"the tests did not end within {seconds:g} seconds", log=log)
    return Artefacts(
        answer=grading.rollout.answer,
        last_message=grading.rollout.last_message,
        reward_json=_read(runtime, handle, "/logs/verifier/reward.json"),
        reward_txt=_read(runtime, handle, "/logs/verifier/reward.txt"),
        test_log=log,
        exit_code=result.exit_code,
    )


def _read(runtime: Runtime, handle: SandboxHandle, path: str) -> bytes | None:
    """Return a reward file; what is too large or no file is cut to nothing a number can be."""
    try:
        return runtime.read_file(handle, path, max_bytes=REWARD_FILE_BYTES)
    except FileMissing:
        return None
    except (OutputTooLarge, FileFault):
        return b""
