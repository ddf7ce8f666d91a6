"""Drive an agent that calls tools in its model's own syntax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult
from rollouts.handlers.dialects import read_calls
from rollouts.handlers.limits import LIMIT_SETTINGS, read_limits
from rollouts.handlers.loop import MAX_CALLS, Loop
from rollouts.handlers.prompt import PROMPT_SETTINGS, given_messages, validate_prompt
from rollouts.handlers.settings import read_choice, read_count, refuse_unknown

TOOL_SETTINGS = frozenset({"no_call", "max_calls"})


class ToolsHandler(AgentHandler):
    """Let a model call the tools of its environment, several in one turn where it wants to.

    Settings: those of `prompt` and of `limits`; `no_call`, what a turn without a call is:
    `answer` ends the episode with its text, `nudge` tells the model to call a tool and counts as
    malformed; `max_calls`, the calls of one turn that are run (default 16).
    """

    name = "tools"
    description = "Native function calling with the environment's tools; submit ends the episode."
    needs_sandbox = True
    takes_messages = True

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        known = PROMPT_SETTINGS | LIMIT_SETTINGS | TOOL_SETTINGS
        refuse_unknown(settings, known, handler=self.name)
        validate_prompt(settings)
        read_limits(settings)
        _no_call(settings)
        _max_calls(settings)

    def shows_tools(self, settings: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Tell that the template shows them."""
        return True

    def run(self, context: AgentContext) -> AgentResult:
        """Run the episode to its end, going on after the last journaled turn if there is one."""
        self.validate(context.settings)
        return Loop(
            context,
            given_messages(context),
            read_calls(_no_call(context.settings)),
            read_limits(context.settings),
            shows_tools=self.shows_tools(context.settings),
            max_calls=_max_calls(context.settings),
        ).to_the_end()


def _no_call(settings: Mapping[str, Any]) -> str:
    return read_choice(settings, "no_call", "answer", ("answer", "nudge"))


def _max_calls(settings: Mapping[str, Any]) -> int:
    return read_count(settings, "max_calls", MAX_CALLS, least=1)
