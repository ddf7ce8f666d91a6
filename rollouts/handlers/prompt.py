"""Write the first messages of an episode: system prompt, demonstrations, task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rollouts.handlers.base import AgentContext, InvalidAgentSettings, Message
from rollouts.handlers.conversation import InvalidConversation, check_conversation
from rollouts.handlers.settings import read_demonstrations, read_template
from rollouts.handlers.templates import check_template, render

PROMPT_SETTINGS = frozenset({"demonstrations", "instruction_template"})
JINJA = "jinja"
SAMPLE: Mapping[str, Any] = MappingProxyType(
    {
        "instruction": "An instruction.",
        "task": {},
        "environment": "environment@1",
        "workdir": "/app",
        "tools": [{"name": "bash", "description": "Run a command."}],
    }
)


@dataclass(frozen=True, kw_only=True)
class PromptTexts:
    """Hold the texts of an environment that the policy will read, as they are stored.

    `format` is `plain` or `jinja`.
    """

    format: str
    system_prompt: str
    settings: Mapping[str, Any]
    tool_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Hold the texts of one episode: an agent that gets them has no template left to render."""

    system_prompt: str
    instruction: str
    settings: Mapping[str, Any]


def validate_prompt(settings: Mapping[str, Any]) -> None:
    """Raise `InvalidAgentSettings` when a setting of the prompt is wrong."""
    read_demonstrations(settings)
    read_template(settings)


def plain_settings(texts: PromptTexts) -> dict[str, Any]:
    """Return the agent's settings as its handler checks them: without the task's template.

    Raises `InvalidAgentSettings` when that is no text.
    """
    settings = dict(texts.settings)
    if texts.format == JINJA and not isinstance(
        settings.pop("instruction_template", "{{ instruction }}"), str
    ):
        raise InvalidAgentSettings("setting 'instruction_template' must be a text")
    return settings


def check_prompt(texts: PromptTexts) -> None:
    """Raise `InvalidTemplate` or `InvalidAgentSettings` for a template that cannot be rendered."""
    if texts.format != JINJA:
        return
    plain_settings(texts)
    check_template("system_prompt", texts.system_prompt, SAMPLE)
    if "instruction_template" in texts.settings:
        check_template("instruction_template", texts.settings["instruction_template"], SAMPLE)
    for number, message in enumerate(read_demonstrations(texts.settings)):
        check_template(f"demonstrations, message {number}", message["content"], SAMPLE)
    for name, given in texts.tool_settings.items():
        if isinstance(given, Mapping) and isinstance(given.get("description"), str):
            check_template(f"description of {name}", given["description"], _without_tools(SAMPLE))


def render_tool_settings(texts: PromptTexts, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tools' settings with their descriptions rendered; raise `InvalidTemplate`.

    `variables` are those of `render_prompt`, but `tools`, which are not made yet.
    """
    settings = {name: dict(given) for name, given in texts.tool_settings.items()}
    if texts.format == JINJA:
        for name, given in settings.items():
            if "description" in given:
                given["description"] = render(
                    f"description of {name}", given["description"], _without_tools(variables)
                )
    return settings


def render_prompt(texts: PromptTexts, variables: Mapping[str, Any]) -> Prompt:
    """Return the prompt of one episode; raise `InvalidTemplate`.

    `variables` are `instruction`, `task`, `environment`, `workdir` and `tools`; plain texts are
    returned as they are.
    """
    instruction = str(variables["instruction"])
    if texts.format != JINJA:
        return Prompt(
            system_prompt=texts.system_prompt, instruction=instruction, settings=texts.settings
        )
    settings = plain_settings(texts)
    template = texts.settings.get("instruction_template")
    if template is not None:
        instruction = render("instruction_template", template, variables)
    if "demonstrations" in settings:
        settings["demonstrations"] = _render_demonstrations(settings, variables)
    return Prompt(
        system_prompt=render("system_prompt", texts.system_prompt, variables),
        instruction=instruction,
        settings=settings,
    )


def first_messages(context: AgentContext) -> list[Message]:
    """Return the system prompt, if any, the demonstrations as real turns, and the task."""
    return prompt_messages(_prompt_of(context))


def given_messages(context: AgentContext) -> list[Message]:
    """Return where the task's own conversation stands, or else the first messages.

    Raises `InvalidAgentSettings` when nobody can go on from that conversation.
    """
    try:
        return opening(_prompt_of(context), context.messages)
    except InvalidConversation as error:
        raise InvalidAgentSettings(f"the task's messages: {error}") from error


def prompt_messages(prompt: Prompt) -> list[Message]:
    """Return the first messages of a rendered prompt."""
    messages: list[Message] = []
    if prompt.system_prompt:
        messages.append({"role": "system", "content": prompt.system_prompt})
    messages += read_demonstrations(prompt.settings)
    task = read_template(prompt.settings).replace("{instruction}", prompt.instruction)
    messages.append({"role": "user", "content": task})
    return messages


def opening(prompt: Prompt, given: Sequence[Message]) -> list[Message]:
    """Return a task's own conversation, or the first messages of the prompt where it has none.

    The environment's system prompt stands before one that has none. Raises `InvalidConversation`.
    """
    if not given:
        return prompt_messages(prompt)
    messages = check_conversation(given)
    if prompt.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": prompt.system_prompt})
    return messages


def _prompt_of(context: AgentContext) -> Prompt:
    return Prompt(
        system_prompt=context.system_prompt,
        instruction=context.instruction,
        settings=context.settings,
    )


def _render_demonstrations(
    settings: Mapping[str, Any], variables: Mapping[str, Any]
) -> list[list[Message]]:
    read_demonstrations(settings)
    return [
        [
            {**message, "content": render("demonstrations", message["content"], variables)}
            for message in conversation
        ]
        for conversation in settings["demonstrations"]
    ]


def _without_tools(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variables.items() if name != "tools"}
