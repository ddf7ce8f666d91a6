"""Find an agent handler by the name that an environment gives, plug-ins included."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points

from rollouts.handlers.base import AgentHandler, InvalidHandler, UnknownHandler
from rollouts.handlers.bash_block import BashBlockHandler
from rollouts.handlers.branch import BranchHandler
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.native_tools import ToolsHandler
from rollouts.handlers.single_turn import SingleTurnHandler

logger = logging.getLogger(__name__)

ENTRY_POINTS = "prorl.agents"
BUILT_IN = (
    BashBlockHandler,
    BranchHandler,
    CommandLineHandler,
    SingleTurnHandler,
    ToolsHandler,
)


class HandlerRegistry(Mapping[str, AgentHandler]):
    """Map names to handlers: the built-in ones, then plug-ins, loaded at the first look.

    A plug-in that cannot be loaded, or whose name is taken, is left out and told in `faults`;
    it takes nothing else with it. Thread-safe.
    """

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        self._group = group
        self._paths: tuple[str, ...] = ()
        self._handlers: dict[str, AgentHandler] = {}
        self._sources: dict[str, str] = {}
        self._faults: list[str] = []
        self._loaded = False
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> AgentHandler:
        """Return the handler of this name."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._all())

    def __len__(self) -> int:
        """Return how many handlers there are."""
        return len(self._all())

    @property
    def faults(self) -> tuple[str, ...]:
        """Say which plug-ins were left out and why, a sentence each."""
        self._all()
        return tuple(self._faults)

    def configure(self, paths: Sequence[str]) -> None:
        """Name plug-ins by dotted path, `package.module.Class`; all are loaded anew."""
        with self._lock:
            self._paths = tuple(paths)
            self._loaded = False

    def register(self, handler: object, *, source: str) -> None:
        """Add a handler, or the class of one; raise `InvalidHandler` that names the source."""
        with self._lock:
            made = _made(handler, source)
            if made.name in self._handlers:
                raise InvalidHandler(
                    f"{source}: the name {made.name!r} is taken by {self._sources[made.name]}"
                )
            self._handlers[made.name] = made
            self._sources[made.name] = source

    def _all(self) -> dict[str, AgentHandler]:
        with self._lock:
            if not self._loaded:
                self._loaded = True
                self._handlers, self._sources, self._faults = {}, {}, []
                for each in BUILT_IN:
                    self.register(each, source="the service")
                for point in sorted(entry_points(group=self._group), key=lambda p: p.name):
                    self._add(point.load, f"entry point {point.name} = {point.value}")
                for path in self._paths:
                    self._add(partial(_imported, path), f"setting AGENT_HANDLERS, {path}")
            return self._handlers

    def _add(self, load: Callable[[], object], source: str) -> None:
        try:
            self.register(load(), source=source)
        except InvalidHandler as fault:
            self._leave_out(str(fault))
        # A plug-in is foreign code: whatever it raises must not end the worker.
        except Exception as error:
            self._leave_out(f"{source}: {type(error).__name__}: {error}")

    def _leave_out(self, reason: str) -> None:
        self._faults.append(reason)
        logger.error("agent handler left out: %s", reason)


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


def _imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
