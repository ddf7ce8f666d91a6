"""Ask once and take the text as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult
from rollouts.handlers.dialects import read_answer
from rollouts.handlers.limits import read_limits
from rollouts.handlers.loop import Loop
from rollouts.handlers.prompt import PROMPT_SETTINGS, given_messages, validate_prompt
from rollouts.handlers.settings import refuse_unknown


class SingleTurnHandler(AgentHandler):
    """Sample one answer; no tools, no sandbox.

    Settings: those of `prompt`. A turn cut by a token limit stops with `context_full` or
    `max_tokens`, its text is the answer all the same.
    """

    name = "single_turn"
    description = "One answer to the instruction, without tools."
    needs_sandbox = False
    takes_messages = True

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        refuse_unknown(settings, PROMPT_SETTINGS, handler=self.name)
        validate_prompt(settings)

    def run(self, context: AgentContext) -> AgentResult:
        """Sample once, or take the answer that the journal holds."""
        self.validate(context.settings)
        return Loop(context, given_messages(context), read_answer, read_limits({})).to_the_end()
