"""Ask once and take the text as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import Action, AgentContext, AgentHandler, AgentResult, StopReason
from rollouts.handlers.episode import Episode
from rollouts.handlers.prompt import PROMPT_SETTINGS, first_messages, validate_prompt
from rollouts.handlers.settings import refuse_unknown
from rollouts.inference.protocol import Generation


class SingleTurnHandler(AgentHandler):
    """Sample one answer; no tools, no sandbox.

    Settings: `demonstrations` and `instruction_template` (see `prompt`). A turn cut by a token
    limit stops with `context_full` or `max_tokens`, its text is the answer all the same.
    """

    name = "single_turn"
    description = "One answer to the instruction, without tools."
    needs_sandbox = False

    def validate(self, settings: Mapping[str, Any]) -> None:
        """Check the names and values of all settings."""
        refuse_unknown(settings, PROMPT_SETTINGS, handler=self.name)
        validate_prompt(settings)

    def run(self, context: AgentContext) -> AgentResult:
        """Sample once, or take the answer that the journal holds."""
        self.validate(context.settings)
        episode = Episode(context, first_messages(context))
        for generation, _ in episode.replay():
            return _finish(episode, generation)
        stop = episode.blocked()
        if stop is not None:
            return episode.result(stop)
        sampled = episode.sample()
        if isinstance(sampled, StopReason):
            return episode.result(sampled)
        episode.record(sampled, Action(kind="answer", text=episode.text(sampled)))
        return _finish(episode, sampled)


def _finish(episode: Episode, generation: Generation) -> AgentResult:
    stop = StopReason.FINISHED
    if generation.finish_reason == "length":
        stop = episode.cut_by(generation) or StopReason.MAX_TOKENS
    return episode.result(stop, episode.text(generation))
