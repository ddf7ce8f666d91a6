"""Read handler settings: one typed reader, one kind of complaint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollouts.handlers.base import InvalidAgentSettings, Message


def refuse_unknown(settings: Mapping[str, Any], known: Collection[str], *, handler: str) -> None:
    """Raise `InvalidAgentSettings` when a setting has a name that the handler does not know."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise InvalidAgentSettings(
            f"{handler}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )


def read_count(settings: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    """Return a whole number of at least `least`."""
    value = settings.get(name, default)
    if type(value) is not int or value < least:
        raise InvalidAgentSettings(
            f"setting {name!r} is {value!r}; it must be a whole number, {least} or more"
        )
    return value


def read_choice(
    settings: Mapping[str, Any], name: str, default: str, choices: Collection[str]
) -> str:
    """Return a setting that is one of a few words."""
    value = settings.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise InvalidAgentSettings(
            f"setting {name!r} is {value!r}; it must be one of {', '.join(sorted(choices))}"
        )
    return value


def read_template(settings: Mapping[str, Any]) -> str:
    """Return `instruction_template`, which holds `{instruction}` once."""
    value = settings.get("instruction_template", "{instruction}")
    if not isinstance(value, str) or value.count("{instruction}") != 1:
        raise InvalidAgentSettings(
            "setting 'instruction_template' must be a text with {instruction} in it once"
        )
    return value


def read_demonstrations(settings: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the turns of all `demonstrations` in one row, ready to stand before the task.

    The setting is a list of conversations, each a list of `{"role", "content"}` that begins with
    the user, alternates, and ends with the assistant.
    """
    value = settings.get("demonstrations", [])
    if not isinstance(value, list):
        raise InvalidAgentSettings("setting 'demonstrations' must be a list of conversations")
    messages: list[Message] = []
    for number, conversation in enumerate(value):
        where = f"setting 'demonstrations', conversation {number}"
        if not isinstance(conversation, list) or not conversation or len(conversation) % 2:
            raise InvalidAgentSettings(
                f"{where}: it must be a list that begins with the user and ends with the assistant"
            )
        for place, message in enumerate(conversation):
            role = ("user", "assistant")[place % 2]
            if (
                not isinstance(message, Mapping)
                or set(message) != {"role", "content"}
                or message["role"] != role
                or not isinstance(message["content"], str)
            ):
                raise InvalidAgentSettings(
                    f"{where}, message {place}: it must be {{'role': '{role}', 'content': text}}"
                )
            messages.append(dict(message))
    return tuple(messages)
