"""Write the first messages of an episode: system prompt, demonstrations, task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.handlers.base import AgentContext, Message
from rollouts.handlers.settings import read_demonstrations, read_template

PROMPT_SETTINGS = frozenset({"demonstrations", "instruction_template"})


def validate_prompt(settings: Mapping[str, Any]) -> None:
    """Raise `InvalidAgentSettings` when a setting of the prompt is wrong."""
    read_demonstrations(settings)
    read_template(settings)


def first_messages(context: AgentContext) -> list[Message]:
    """Return the system prompt, if any, the demonstrations as real turns, and the task."""
    messages: list[Message] = []
    if context.system_prompt:
        messages.append({"role": "system", "content": context.system_prompt})
    messages += read_demonstrations(context.settings)
    task = read_template(context.settings).replace("{instruction}", context.instruction)
    messages.append({"role": "user", "content": task})
    return messages
