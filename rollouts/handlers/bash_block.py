"""Drive an agent that writes exactly one fenced command a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult
from rollouts.handlers.dialects import read_block
from rollouts.handlers.limits import LIMIT_SETTINGS, read_limits
from rollouts.handlers.loop import Loop, require_tools
from rollouts.handlers.prompt import PROMPT_SETTINGS, given_messages, validate_prompt
from rollouts.handlers.settings import refuse_unknown


class BashBlockHandler(AgentHandler):
    """Let a model think in the open and act by one ```bash block a turn, as mini-swe-agent does.

    A block that holds `submit`, alone or with an answer, ends the episode. Settings: those of
    `prompt` and of `limits`.
    """

    name = "bash_block"
    description = "Exactly one fenced bash block a turn; submit in it ends the episode."
    needs_sandbox = True
    takes_messages = True

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        refuse_unknown(settings, PROMPT_SETTINGS | LIMIT_SETTINGS, handler=self.name)
        validate_prompt(settings)
        read_limits(settings)

    def run(self, context: AgentContext) -> AgentResult:
        """Run the episode to its end, going on after the last journaled turn if there is one."""
        self.validate(context.settings)
        require_tools(context, ("bash", "submit"), handler=self.name)
        limits = read_limits(context.settings)
        return Loop(context, given_messages(context), read_block, limits).to_the_end()
