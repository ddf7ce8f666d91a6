"""RUN: drive the agent against the policy's servers, and store what was sampled."""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.conf import settings

from rollouts.exceptions import InfraFault
from rollouts.handlers.base import AgentContext, AgentResult, Budget
from rollouts.handlers.registry import get_handler
from rollouts.inference.pool import REQUEST_SECONDS, InferencePool
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.rendering import load_renderer
from rollouts.inference.trace import Trace
from rollouts.models import Policy, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services.claim import ensure_held
from rollouts.services.finish import RunResult, finish_run
from rollouts.services.servers import adapters, routable_servers
from rollouts.services.trajectories import store_trajectory
from rollouts.stages import process
from rollouts.stages.database import database
from rollouts.stages.journal import StageJournal
from rollouts.stages.lease import Held
from rollouts.stages.network import reachable
from rollouts.tools.base import ToolUnavailable
from rollouts.tools.registry import build_tools
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.models import Sandbox
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.runtime.sessions import ShellSession, ShellState
from sandboxes.services.lifecycle import find_sandbox, mark_frozen
from sandboxes.services.node import node_runtime
from sandboxes.services.snapshots import take_due_snapshots
from sandboxes.states import SandboxPurpose, SandboxState

_TIMED_TOOLS = ("bash", "ipython")  # those whose calls the budgets bound


def carry_out_run(held: Held) -> None:
    """Carry out RUN. Raises LeaseLost and the faults of sandboxes, inference and agents."""
    with database():
        rollout = Rollout.objects.select_related(
            "experiment__policy", "environment", "group__task"
        ).get(pk=held.claim.rollout_id)
        sandbox = find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN)
        journal = StageJournal(held.claim)
    trace = Trace()
    result, tools = _run_agent(held, rollout, sandbox, journal, trace)
    stored = store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.id,
        attempt_id=held.claim.attempt_id,
        segments=trace.as_dict(),
        messages=result.messages,
        tools=tools,
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
    renderer = load_renderer(policy.tokenizer)
    generate = _Generate(held, policy, sampling, budgets, renderer.stop_token_ids, rollout)
    timed = {"timeout_seconds": min(budgets.tool_seconds, settings.TOOL_CALL_LIMIT_SECONDS)}
    tools = build_tools(
        environment.tools, {name: timed for name in _TIMED_TOOLS if name in environment.tools}
    )
    limit = rollout.group.task.payload.get("agent_timeout_seconds") or budgets.run_seconds
    seconds = min(limit, budgets.run_seconds)
    network = ExitStack()
    shell: ShellSession | None = None
    inside: EpisodeSandbox | None = None
    try:
        env = _connect(network, rollout, sandbox, generate)
        shell = _open_shell(sandbox, journal, env) if rollout.needs_sandbox else None
        inside = _reach(sandbox, journal, env)
        if sandbox is not None:
            journal.after_turn = partial(_take_snapshots, sandbox)
            done = journal.turns_done()
            if done == len(journal.replay()) > 0:
                # The lost worker may have had no time to take what its last turn was asked for.
                journal.after_turn(done, journal.shell_state)
        result = get_handler(environment.agent).run(
            AgentContext(
                instruction=rollout.group.task.instruction,
                settings=environment.agent_settings,
                system_prompt=environment.system_prompt,
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
                    deadline=generate.clock() + seconds - journal.seconds_spent,
                ),
                cancelled=held.stopping,
                shell=shell,
                sandbox=inside,
                sampling=generate.params(sampling.max_tokens),
                clock=generate.clock,
            )
        )
    except ToolUnavailable as lack:  # the image's or the environment's: no retry mends it
        raise InfraFault(str(lack), code=lack.code, retryable=False) from lack
    finally:
        if inside is not None:
            inside.close()
        if shell is not None:
            shell.close()
        network.close()
    return result, [tool.schema() for tool in tools.values()]


def _connect(
    network: ExitStack, rollout: Rollout, sandbox: Sandbox | None, generate: "_Generate"
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
    sandbox: Sandbox | None, journal: StageJournal, env: Mapping[str, str]
) -> ShellSession:
    """Open the episode's shell; a journal of an earlier worker restores directory and exports."""
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
    if journal.shell_state is not None:
        shell.restore(journal.shell_state)
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


@dataclass
class _Generate:
    """Sample one turn on the policy's servers; waiting for them does not use the agent's time."""

    held: Held
    policy: Policy
    sampling: Sampling
    budgets: Budgets
    stop_token_ids: tuple[int, ...]
    rollout: Rollout
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._pool = InferencePool(
            process.router(),
            adapters(),
            self._servers,
            request_seconds=max(REQUEST_SECONDS, self.budgets.run_seconds),
        )
        self._version = self.policy.version
        self._asked = 0.0

    def clock(self) -> float:
        """Return monotonic seconds, standing still while no server answered."""
        return time.monotonic() - self.waited

    def params(self, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one request."""
        seed = self.sampling.seed
        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k if self.sampling.top_k > 0 else None,
            max_tokens=max_tokens,
            seed=None if seed is None else (seed + self.rollout.sample) % 2**31,
            stop_token_ids=self.stop_token_ids,
        )

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        """Return the sampled turn, stamped with the policy version in force when it was asked.

        A request that waited for a slot may carry the version of one second before.
        """
        began = self._asked = time.monotonic()
        generation = self._pool.generate(
            str(self.rollout.id),
            prompt_ids,
            self.params(max_tokens),
            budget_seconds=max(0.1, self.budgets.inference_wait_seconds - self.waited),
            generation_seconds=max(1.0, self.held.remaining_seconds()),
            cancelled=self.held.stopping,
        )
        self.waited += max(0.0, time.monotonic() - began - generation.seconds)
        if generation.policy_version is not None:
            return generation
        return Generation(
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            policy_version=self._version,
            server_id=generation.server_id,
            seconds=generation.seconds,
            logprob_mode=generation.logprob_mode,
        )

    def server_address(self) -> str | None:
        """Return the address of a server of the policy, any of those that answer."""
        with database():
            servers = self._servers()
        return random.choice(servers).url if servers else None  # noqa: S311 - spreads the load

    def _servers(self) -> list[Server]:
        found = routable_servers(policy=self.policy, since=self._asked)
        if found.version is not None:
            self._version = found.version
        return list(found.servers)
