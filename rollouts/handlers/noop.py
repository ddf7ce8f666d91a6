"""Leave a task alone: what no evaluator may pay for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult, StopReason


class NoopHandler(AgentHandler):
    """Submit at once and without an answer. For verifications only: no environment names it."""

    name = "noop"
    description = "Nothing is done."
    needs_sandbox = False

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Accept any: it reads none."""

    def run(self, context: AgentContext) -> AgentResult:
        """Return an episode of nothing."""
        return AgentResult(
            stop_reason=StopReason.FINISHED,
            answer=None,
            messages=({"role": "user", "content": context.instruction},),
        )
