"""Sample one turn from a given point of a conversation, a sandbox snapshot, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, AgentHandler, AgentResult
from rollouts.handlers.dialects import Read, read_answer, read_block, read_calls, read_line
from rollouts.handlers.limits import LIMIT_SETTINGS, read_limits
from rollouts.handlers.loop import Loop, require_tools
from rollouts.handlers.prompt import PROMPT_SETTINGS, given_messages, validate_prompt
from rollouts.handlers.settings import read_choice, refuse_unknown

READS: Mapping[str, Read] = {
    "tools": read_calls("answer"),
    "bash_block": read_block,
    "command_line": read_line,
    "answer": read_answer,
}


class BranchHandler(AgentHandler):
    """Sample one action where another episode stood; k samples are the k rollouts of a group.

    The conversation is the task's own `messages`, or the usual prompt where it has none; its
    assistant turns are part of the prompt and never trained on. The sandbox is the group's
    snapshot, where it has one. The answer of the rollout is the action: the command, the text, or
    the calls as JSON. Settings: those of `prompt` and of `limits`; `style`, how a turn is read:
    `tools`, `bash_block`, `command_line` or `answer`; `execute`, `yes` or `no`: whether the action
    is carried out before the episode ends. A malformed action ends it as `malformed_action`.
    """

    name = "branch"
    description = "One turn from a given message prefix or sandbox snapshot."
    needs_sandbox = True
    takes_messages = True

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        known = PROMPT_SETTINGS | LIMIT_SETTINGS | {"style", "execute"}
        refuse_unknown(settings, known, handler=self.name)
        validate_prompt(settings)
        read_limits(settings)
        _style(settings)
        _executes(settings)

    def shows_tools(self, settings: Mapping[str, Any]) -> bool:
        """Tell that the style `tools` shows them."""
        return _style(settings) == "tools"

    def run(self, context: AgentContext) -> AgentResult:
        """Sample one turn and carry it out, or take what the journal holds of it."""
        self.validate(context.settings)
        style = _style(context.settings)
        if style in ("bash_block", "command_line"):
            require_tools(context, ("bash", "submit"), handler=self.name)
        return Loop(
            context,
            given_messages(context),
            READS[style],
            read_limits(context.settings),
            shows_tools=self.shows_tools(context.settings),
            one_turn=True,
            executes=_executes(context.settings),
        ).to_the_end()


def _style(settings: Mapping[str, Any]) -> str:
    return read_choice(settings, "style", "tools", READS)


def _executes(settings: Mapping[str, Any]) -> bool:
    return read_choice(settings, "execute", "yes", ("yes", "no")) == "yes"
