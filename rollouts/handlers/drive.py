"""Run an agent from its first hook to its last."""

from __future__ import annotations

from dataclasses import replace

from rollouts.handlers.base import (
    AgentCancelled,
    AgentContext,
    AgentHandler,
    AgentResult,
    CommandInterrupted,
    StopReason,
)
from rollouts.handlers.episode import Episode
from rollouts.tools.base import ToolUnavailable
from sandboxes.runtime.exceptions import SandboxFault, SandboxGone

POLICYS_LIMITS = ("memory", "disk")  # the lifetime is the service's own backstop
# What an ended sandbox is first met as.
_BY_ITS_END = (SandboxFault, ToolUnavailable, CommandInterrupted)


def drive(handler: AgentHandler, context: AgentContext) -> AgentResult:
    """Run `prepare`, `run` and `conclude`; a fault that `on_fault` takes on becomes its result.

    A sandbox that ended at a limit of its own is the policy's doing, whatever the agent says to
    it: the episode ends with `sandbox_limit` and all that was sampled.
    """
    try:
        handler.prepare(context)
        return handler.conclude(context, handler.run(context))
    except AgentCancelled:
        raise
    except Exception as fault:
        if context.cancelled():
            raise
        limit = _limit(context, fault) if isinstance(fault, _BY_ITS_END) else None
        if limit is not None:
            return _ended_at(limit, context)
        result = handler.on_fault(context, fault)
        if result is None:
            raise
        return result


def _limit(context: AgentContext, fault: Exception) -> str | None:
    told = fault.limit if isinstance(fault, SandboxGone) else None
    limit = told or context.over_limit()
    return limit if limit in POLICYS_LIMITS else None


def _ended_at(limit: str, context: AgentContext) -> AgentResult:
    """Return the episode as it stood, with the turns of earlier workers not taken in yet."""
    episode = context.books.episode or Episode(context, ())
    for _turn in episode.replay():
        pass
    return replace(episode.result(StopReason.SANDBOX_LIMIT), over_limit=limit)
