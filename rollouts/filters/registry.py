"""Find a rule by its name, plug-ins included."""

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rollouts.filters.base import GroupFilter, InvalidFilter
from rollouts.filters.rules import BUILT_IN

logger = logging.getLogger(__name__)

ENTRY_POINTS = "prorl.group_filters"
TOO_FEW_COMPLETE = "too_few_complete"
TOO_STALE = "too_stale"
REWOUND = "rewound"
# What the service itself says of a group that it keeps from the trainer.
RESERVED = (TOO_FEW_COMPLETE, TOO_STALE, REWOUND)
MAX_NAME = 64


class FilterRegistry(Mapping[str, type[GroupFilter]]):
    """Map names to rules: the built-in ones, then plug-ins, loaded at the first look.

    A plug-in that cannot be loaded, or whose name is taken, is left out and told in `faults`;
    it takes nothing else with it. Thread-safe.
    """

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        self._group = group
        self._paths: tuple[str, ...] = ()
        self._rules: dict[str, type[GroupFilter]] = {}
        self._sources: dict[str, str] = {}
        self._faults: list[str] = []
        self._loaded = False
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> type[GroupFilter]:
        """Return the rule of this name."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._all())

    def __len__(self) -> int:
        """Return how many rules there are."""
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

    def register(self, rule: object, *, source: str) -> None:
        """Add a rule's class; raise `InvalidFilter` that names the source."""
        with self._lock:
            checked = _checked(rule, source)
            if checked.name in self._rules or checked.name in RESERVED:
                holder = self._sources.get(checked.name, "the service")
                raise InvalidFilter(f"{source}: the name {checked.name!r} is taken by {holder}")
            self._rules[checked.name] = checked
            self._sources[checked.name] = source

    def _all(self) -> dict[str, type[GroupFilter]]:
        with self._lock:
            if not self._loaded:
                self._loaded = True
                self._rules, self._sources, self._faults = {}, {}, []
                for each in BUILT_IN:
                    self.register(each, source="the service")
                for point in sorted(entry_points(group=self._group), key=lambda p: p.name):
                    self._add(point.load, f"entry point {point.name} = {point.value}")
                for path in self._paths:
                    self._add(partial(_imported, path), f"setting GROUP_FILTERS, {path}")
            return self._rules

    def _add(self, load: Callable[[], object], source: str) -> None:
        try:
            self.register(load(), source=source)
        except InvalidFilter as fault:
            self._leave_out(str(fault))
        # A plug-in is foreign code: whatever it raises must not end the process.
        except Exception as error:
            self._leave_out(f"{source}: {type(error).__name__}: {error}")

    def _leave_out(self, reason: str) -> None:
        self._faults.append(reason)
        logger.error("group filter left out: %s", reason)


FILTERS = FilterRegistry()


def make_rule(entry: Any) -> GroupFilter:
    """Return the rule of `{"rule": name, ...its settings}`. Raises InvalidFilter."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("rule"), str):
        raise InvalidFilter('A filter is an object such as {"rule": "no_variance"}.')
    rule = FILTERS.get(entry["rule"])
    if rule is None:
        broken = "".join(f"; left out: {fault}" for fault in FILTERS.faults)
        raise InvalidFilter(
            f"There is no filter {entry['rule']!r}; known are {', '.join(sorted(FILTERS))}{broken}."
        )
    return rule.parse({str(name): value for name, value in entry.items() if name != "rule"})


def _checked(rule: object, source: str) -> type[GroupFilter]:
    if not inspect.isclass(rule) or not issubclass(rule, GroupFilter) or inspect.isabstract(rule):
        raise InvalidFilter(f"{source}: {rule!r} is no class of a GroupFilter with a refuse method")
    if not is_dataclass(rule):
        raise InvalidFilter(f"{source}: {rule!r} is no dataclass; its fields are its settings")
    for attribute, kind in (("name", str), ("description", str), ("judges_task", bool)):
        value = getattr(rule, attribute, None)
        if not isinstance(value, kind) or value == "":
            raise InvalidFilter(f"{source}: its {attribute} is {value!r}, not a {kind.__name__}")
    if len(rule.name) > MAX_NAME:
        raise InvalidFilter(f"{source}: its name is longer than {MAX_NAME} characters")
    return rule


def _imported(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
