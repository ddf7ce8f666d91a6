"""RUN: drive the agent against the policy's servers, and store what was sampled."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from rollouts.exceptions import InfraFault
from rollouts.handlers.base import AgentContext, AgentResult, Budget, StopReason
from rollouts.handlers.drive import drive
from rollouts.handlers.registry import get_handler
from rollouts.inference.rendering import load_renderer
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION, Trace
from rollouts.models import Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services.claim import ensure_held
from rollouts.services.finish import RunResult, drop_rollout, finish_run
from rollouts.services.trajectories import store_trajectory
from rollouts.stages.database import database
from rollouts.stages.generating import Generator, PolicyLagDrop
from rollouts.stages.journal import StageJournal
from rollouts.stages.lease import Held
from rollouts.stages.network import reachable
from rollouts.stages.prompting import tools_and_prompt
from rollouts.tools.base import ToolUnavailable
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.models import Sandbox
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.runtime.sessions import ShellSession, ShellState
from sandboxes.services.lifecycle import find_sandbox, mark_frozen
from sandboxes.services.node import node_runtime
from sandboxes.services.snapshots import take_due_snapshots
from sandboxes.states import SandboxPurpose, SandboxState


def carry_out_run(held: Held) -> None:
    """Carry out RUN. Raises LeaseLost and the faults of sandboxes, inference and agents."""
    with database():
        rollout = Rollout.objects.select_related(
            "experiment__policy", "environment", "group__task", "group__snapshot"
        ).get(pk=held.claim.rollout_id)
        sandbox = find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN)
        journal = StageJournal(held.claim)
    trace = Trace()
    try:
        result, tools = _run_agent(held, rollout, sandbox, journal, trace)
    except PolicyLagDrop as lag:
        with database():
            drop_rollout(claim=held.claim, code=lag.code, detail=str(lag))
        return
    stored = store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.id,
        attempt_id=held.claim.attempt_id,
        segments=trace.as_dict(),
        messages=result.messages,
        tools=tools,
        agent={
            "malformed_actions": result.malformed_actions,
            "tool_counts": dict(result.tool_counts),
            "tool_errors": dict(result.tool_errors),
        },
    )
    if sandbox is not None:
        _freeze(held, sandbox)
    last = next((m for m in reversed(result.messages) if m["role"] == "assistant"), None)
    with database():
        finish_run(
            claim=held.claim,
            result=RunResult(
                stop_reason=result.stop_reason.value,
                answer=result.answer,
                last_message=str(last["content"]) if last else "",
                turns=result.turns,
                sampled_tokens=result.sampled_tokens,
                tool_calls=result.tool_calls,
                inference_seconds=result.inference_seconds,
                tool_seconds=result.tool_seconds,
                trajectory=stored,
            ),
        )


def _run_agent(
    held: Held,
    rollout: Rollout,
    sandbox: Sandbox | None,
    journal: StageJournal,
    trace: Trace,
) -> tuple[AgentResult, list[dict[str, Any]]]:
    environment, policy = rollout.environment, rollout.experiment.policy
    budgets = Budgets.stored(rollout.experiment.budgets)
    sampling = Sampling.stored(rollout.experiment.sampling)
    stamps = _stamps(journal)
    known = [stamp for stamp in stamps if stamp != UNKNOWN_POLICY_VERSION]
    renderer = None if policy.is_text_only else load_renderer(policy.tokenizer)
    generate = Generator(
        held,
        policy,
        sampling,
        budgets,
        () if renderer is None else renderer.stop_token_ids,
        rollout,
        oldest_version=min(known, default=None),
        unknown_versions=len(known) < len(stamps),
    )
    limit = rollout.group.task.payload.get("agent_timeout_seconds") or budgets.run_seconds
    seconds = min(limit, budgets.run_seconds)
    network = ExitStack()
    shell: ShellSession | None = None
    inside: EpisodeSandbox | None = None
    try:
        tools, prompt = network.enter_context(
            tools_and_prompt(rollout, budgets, cancelled=held.stopping)
        )
        env = _connect(network, rollout, sandbox, generate)
        shell = _open_shell(rollout, sandbox, journal, env) if rollout.needs_sandbox else None
        inside = _reach(sandbox, journal, env)
        if sandbox is not None:
            journal.after_turn = partial(_take_snapshots, sandbox)
            done = journal.turns_done()
            if done == len(journal.replay()) > 0:
                # The lost worker may have had no time to take what its last turn was asked for.
                journal.after_turn(done, journal.shell_state)
        generate.deadline = generate.clock() + seconds - journal.seconds_spent
        result = drive(
            get_handler(environment.agent),
            AgentContext(
                instruction=prompt.instruction,
                settings=prompt.settings,
                system_prompt=prompt.system_prompt,
                tools=tools,
                renderer=renderer,
                trace=trace,
                generate=generate,
                journal=journal,
                budget=Budget(
                    max_turns=budgets.max_turns,
                    max_tokens=budgets.max_sampled_tokens,
                    turn_tokens=sampling.max_tokens,
                    context_tokens=policy.context_tokens,
                    deadline=generate.deadline,
                    tool_seconds=budgets.max_tool_seconds,
                ),
                cancelled=held.stopping,
                shell=shell,
                sandbox=inside,
                sampling=generate.params(sampling.max_tokens),
                clock=generate.clock,
                chat=generate.chat if policy.is_text_only else None,
                messages=rollout.group.task.payload.get("messages") or (),
            ),
        )
        generate.drop_unknown()
        if generate.lagged:
            result = replace(result, stop_reason=StopReason.POLICY_LAG)
    except ToolUnavailable as lack:  # the image's or the environment's: no retry mends it
        raise InfraFault(str(lack), code=lack.code, retryable=False) from lack
    finally:
        if inside is not None:
            inside.close()
        if shell is not None:
            shell.close()
        network.close()
    return result, [tool.schema() for tool in tools.values()]


def _stamps(journal: StageJournal) -> list[int]:
    """Return the policy versions of the tokens that earlier workers left, unknown ones as such."""
    stamps: list[int] = []
    for turn in journal.replay():
        told = turn.generation.policy_version
        if turn.generation.version_runs:
            stamps += [stamp for stamp, _run in turn.generation.version_runs]
        elif turn.generation.token_ids:
            stamps.append(UNKNOWN_POLICY_VERSION if told is None else told)
    return stamps


def _connect(
    network: ExitStack, rollout: Rollout, sandbox: Sandbox | None, generate: Generator
) -> Mapping[str, str]:
    """Serve the sandbox's network until the stack closes; returns the variables it needs."""
    if sandbox is None or sandbox.handle is None:
        return {}
    handle = SandboxHandle.from_dict(sandbox.handle)
    serving = reachable(handle, environment=rollout.environment, model=generate.server_address)
    return network.enter_context(serving)


def _take_snapshots(sandbox: Sandbox, turns: int, shell_state: ShellState | None) -> None:
    assert sandbox.handle is not None
    with database():
        take_due_snapshots(
            sandbox=sandbox,
            runtime=node_runtime(),
            handle=SandboxHandle.from_dict(sandbox.handle),
            turn=turns,
            workdir="" if shell_state is None else shell_state.cwd,
        )


def _open_shell(
    rollout: Rollout, sandbox: Sandbox | None, journal: StageJournal, env: Mapping[str, str]
) -> ShellSession:
    """Open the episode's shell.

    A journal of an earlier worker restores directory and exports; a snapshot its directory.
    """
    if sandbox is None or sandbox.state != SandboxState.READY or sandbox.handle is None:
        raise InfraFault(
            "The sandbox is not there any more.", code="sandbox.gone", restart_from_init=True
        )
    runtime, handle = node_runtime(), SandboxHandle.from_dict(sandbox.handle)
    if not runtime.alive(handle):
        raise InfraFault(
            "The sandbox's instance ended.", code="sandbox.gone", restart_from_init=True
        )
    shell = runtime.open_shell(handle, env=env)
    state, snapshot = journal.shell_state, rollout.group.snapshot
    if state is None and snapshot is not None and snapshot.workdir:
        state = ShellState(cwd=snapshot.workdir, exports="")
    if state is not None:
        shell.restore(state)
    return shell


def _reach(
    sandbox: Sandbox | None, journal: StageJournal, env: Mapping[str, str]
) -> EpisodeSandbox | None:
    """Return the way to the episode's sandbox beside its shell; nothing is started yet."""
    if sandbox is None or sandbox.handle is None:
        return None
    handle = SandboxHandle.from_dict(sandbox.handle)
    return EpisodeSandbox(node_runtime(), handle, resumed=bool(journal.replay()), env=env)


def _freeze(held: Held, sandbox: Sandbox) -> None:
    """End the agent's processes and keep its writable layer for grading. Raises LeaseLost."""
    assert sandbox.handle is not None
    with database():
        ensure_held(claim=held.claim)
    layer = node_runtime().freeze(SandboxHandle.from_dict(sandbox.handle))
    with database():
        mark_frozen(sandbox_id=sandbox.id, layer=layer)
