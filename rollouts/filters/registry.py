"""Find a rule by its name, plug-ins included."""

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from evaluators.plugins import PluginRegistry
from rollouts.filters.base import GroupFilter, InvalidFilter
from rollouts.filters.rules import BUILT_IN

ENTRY_POINTS = "prorl.group_filters"
TOO_FEW_COMPLETE = "too_few_complete"
TOO_STALE = "too_stale"
REWOUND = "rewound"
# What the service itself says of a group that it keeps from the trainer.
RESERVED = (TOO_FEW_COMPLETE, TOO_STALE, REWOUND)
MAX_NAME = 64


class FilterRegistry(PluginRegistry[type[GroupFilter]]):
    """Map names to rules."""

    kind = "group filter"
    setting = "GROUP_FILTERS"
    invalid = InvalidFilter
    built_in = BUILT_IN
    reserved = RESERVED

    def __init__(self, group: str = ENTRY_POINTS) -> None:
        super().__init__(group)

    def check(self, candidate: object, source: str) -> tuple[str, type[GroupFilter]]:
        """Return the rule's class; raise InvalidFilter."""
        rule = _checked(candidate, source)
        return rule.name, rule


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
