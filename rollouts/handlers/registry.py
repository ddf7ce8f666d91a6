"""Find an agent handler by the name that an environment gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollouts.handlers.base import AgentHandler, UnknownHandler
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.single_turn import SingleTurnHandler

HANDLERS: Mapping[str, AgentHandler] = MappingProxyType(
    {handler.name: handler for handler in (CommandLineHandler(), SingleTurnHandler())}
)


def get_handler(name: str) -> AgentHandler:
    """Return the handler; raise `UnknownHandler` that lists the known ones."""
    handler = HANDLERS.get(name)
    if handler is None:
        raise UnknownHandler(f"no agent handler {name!r}; known are {', '.join(sorted(HANDLERS))}")
    return handler
