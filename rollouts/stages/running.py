"""RUN: drive the agent against the policy's servers, and store what was sampled."""

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
from rollouts.stages.generating import Generator
from rollouts.stages.inside import inside
from rollouts.stages.journal import StageJournal
from rollouts.stages.lag import PolicyLagDrop
from rollouts.stages.lease import Held
from rollouts.stages.prompting import tools_and_prompt
from rollouts.stages.verifying import run_check
from rollouts.states import Purpose
from rollouts.tools.base import ToolUnavailable
from sandboxes.models import Sandbox
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.runtime.sessions import ShellState
from sandboxes.services.lifecycle import find_sandbox, mark_frozen
from sandboxes.services.node import node_runtime
from sandboxes.services.snapshots import take_due_snapshots
from sandboxes.setup_files import mask
from sandboxes.states import SandboxPurpose


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
        is_check = rollout.experiment.purpose == Purpose.VERIFICATION
        run = run_check if is_check else _run_agent
        result, tools = run(held, rollout, sandbox, journal, trace)
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
            "over_limit": result.over_limit,
        },
    )
    if sandbox is not None and result.stop_reason != StopReason.SANDBOX_LIMIT:
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
    stack = ExitStack()
    try:
        tools, prompt = stack.enter_context(
            tools_and_prompt(rollout, budgets, cancelled=held.stopping)
        )
        within = stack.enter_context(
            inside(rollout, sandbox, journal, model=generate.server_address)
        )
        journal.secrets = within.secrets
        if sandbox is not None and within.ended is None:
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
                generate=within.sampling(generate),
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
                shell=within.shell,
                sandbox=within.access,
                sampling=generate.params(sampling.max_tokens),
                clock=generate.clock,
                chat=within.sampling(generate.chat) if policy.is_text_only else None,
                messages=rollout.group.task.payload.get("messages") or (),
                over_limit=within.over_limit,
                mask=partial(mask, secrets=within.secrets),
            ),
        )
        generate.lag.drop_unknown()
        if generate.lag.cut and result.stop_reason != StopReason.SANDBOX_LIMIT:
            result = replace(result, stop_reason=StopReason.POLICY_LAG)
    except ToolUnavailable as lack:  # the image's or the environment's: no retry mends it
        raise InfraFault(str(lack), code=lack.code, retryable=False) from lack
    finally:
        stack.close()
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


def _freeze(held: Held, sandbox: Sandbox) -> None:
    """End the agent's processes and keep its writable layer for grading. Raises LeaseLost."""
    assert sandbox.handle is not None
    with database():
        ensure_held(claim=held.claim)
    layer = node_runtime().freeze(SandboxHandle.from_dict(sandbox.handle))
    with database():
        mark_frozen(sandbox_id=sandbox.id, layer=layer)
