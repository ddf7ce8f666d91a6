"""RUN of a verification: the reference solution, or nothing, in place of a policy."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollouts.exceptions import InfraFault
from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult, Budget
from rollouts.handlers.drive import drive
from rollouts.handlers.noop import NoopHandler
from rollouts.handlers.oracle import OracleHandler
from rollouts.inference.protocol import Generation
from rollouts.inference.trace import Trace
from rollouts.models import Rollout
from rollouts.options import Budgets
from rollouts.services.solutions import ORACLE, ROLE, solution_of
from rollouts.stages.inside import Inside, inside
from rollouts.stages.journal import StageJournal
from rollouts.stages.lease import Held
from sandboxes.models import Sandbox
from sandboxes.services.node import node_runtime
from sandboxes.setup_files import mask


def run_check(
    held: Held,
    rollout: Rollout,
    sandbox: Sandbox | None,
    journal: StageJournal,
    trace: Trace,
) -> tuple[AgentResult, list[dict[str, Any]]]:
    """Carry out a verification's rollout; the trace stays empty, as nothing is sampled.

    Raises LeaseLost, AgentCancelled and the faults of sandboxes.
    """
    budgets = Budgets.stored(rollout.experiment.budgets)
    limit = rollout.group.task.payload.get("agent_timeout_seconds") or budgets.run_seconds
    seconds = min(float(limit), budgets.run_seconds, max(1.0, held.remaining_seconds()))
    with inside(rollout, sandbox, journal, model=lambda: None) as within:
        context = AgentContext(
            instruction=rollout.group.task.instruction,
            settings={},
            system_prompt="",
            tools={},
            renderer=None,
            trace=trace,
            generate=_refuse,
            journal=journal,
            budget=Budget(
                max_turns=0,
                max_tokens=0,
                turn_tokens=0,
                context_tokens=0,
                deadline=time.monotonic() + seconds,
            ),
            cancelled=held.stopping,
            shell=within.shell,
            sandbox=within.access,
            over_limit=within.over_limit,
            mask=partial(mask, secrets=within.secrets),
        )
        return drive(_handler(rollout, within), context), []


def _handler(rollout: Rollout, within: Inside) -> AgentHandler:
    if rollout.group.metadata.get(ROLE) != ORACLE:
        return NoopHandler()
    solution = solution_of(rollout.group.task, rollout.environment)
    write = None if within.handle is None else partial(node_runtime().write_files, within.handle)
    return OracleHandler(
        files=solution.files,
        answer=solution.answer,
        write=write,
        workdir=rollout.environment.workdir,
    )


def _refuse(prompt_ids: Sequence[int], max_tokens: int) -> Generation:  # noqa: ARG001
    raise InfraFault(
        "A verification samples nothing.", code="verification.sampled", retryable=False
    )
