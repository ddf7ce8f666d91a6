"""Find an agent handler by the name that an environment gives, plug-ins included."""

from __future__ import annotations

import inspect

from evaluators.plugins import PluginRegistry
from rollouts.handlers.base import AgentHandler, InvalidHandler, UnknownHandler
from rollouts.handlers.bash_block import BashBlockHandler
from rollouts.handlers.branch import BranchHandler
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.native_tools import ToolsHandler
from rollouts.handlers.single_turn import SingleTurnHandler

ENTRY_POINTS = "prorl.agents"
BUILT_IN = (
    BashBlockHandler,
    BranchHandler,
    CommandLineHandler,
    SingleTurnHandler,
    ToolsHandler,
)


class HandlerRegistry(PluginRegistry[AgentHandler]):
    """Map names to handlers."""

    kind = "agent handler"
    setting = "AGENT_HANDLERS"
    invalid = InvalidHandler
    built_in = BUILT_IN

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        super().__init__(group)

    def check(self, candidate: object, source: str) -> tuple[str, AgentHandler]:
        """Return the handler, made if it is a class; raise InvalidHandler."""
        made = _made(candidate, source)
        return made.name, made


HANDLERS = HandlerRegistry()


def get_handler(name: str) -> AgentHandler:
    """Return the handler; raise `UnknownHandler` that lists the known and the broken ones."""
    handler = HANDLERS.get(name)
    if handler is None:
        broken = "".join(f"; left out: {fault}" for fault in HANDLERS.faults)
        raise UnknownHandler(
            f"no agent handler {name!r}; known are {', '.join(sorted(HANDLERS))}{broken}"
        )
    return handler


def _made(handler: object, source: str) -> AgentHandler:
    if inspect.isclass(handler) and issubclass(handler, AgentHandler):
        handler = handler()
    if not isinstance(handler, AgentHandler):
        raise InvalidHandler(f"{source}: {handler!r} is no AgentHandler")
    for attribute, kind in (("name", str), ("description", str), ("needs_sandbox", bool)):
        value = getattr(handler, attribute, None)
        if not isinstance(value, kind) or value == "":
            raise InvalidHandler(f"{source}: its {attribute} is {value!r}, not a {kind.__name__}")
    return handler
