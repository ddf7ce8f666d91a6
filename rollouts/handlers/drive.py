"""Run an agent from its first hook to its last."""

from __future__ import annotations

from rollouts.handlers.base import AgentCancelled, AgentContext, AgentHandler, AgentResult


def drive(handler: AgentHandler, context: AgentContext) -> AgentResult:
    """Run `prepare`, `run` and `conclude`; a fault that `on_fault` takes on becomes its result."""
    try:
        handler.prepare(context)
        return handler.conclude(context, handler.run(context))
    except AgentCancelled:
        raise
    except Exception as fault:
        if context.cancelled():
            raise
        result = handler.on_fault(context, fault)
        if result is None:
            raise
        return result
