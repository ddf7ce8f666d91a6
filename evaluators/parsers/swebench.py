"""Use a parser of the optional package `swebench`.

Its `__init__` imports docker, modal and datasets, which a parser does not need: here only the
modules of its parsers are loaded, so `pip install --no-deps swebench` is enough.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from evaluators.base import InvalidSettings
from evaluators.parsers.base import Results, Status

PREFIX = "swebench:"
_SHELLS = ("swebench", "swebench.harness")


@dataclass(frozen=True)
class _Spec:
    """The fields of swebench's TestSpec that its parsers read."""

    instance_id: str
    repo: str
    version: str
    image: str = ""
    eval_script_list: list[str] = field(default_factory=list)


def is_installed() -> bool:
    """Tell whether the package is there, without loading it."""
    return importlib.util.find_spec("swebench") is not None


def parse_with_swebench(
    name: str, log: str, *, instance_id: str = "", repo: str = "", version: str = ""
) -> Results:
    """Return what swebench's parser of that name finds; raise `InvalidSettings` without it."""
    registry = load_registry()
    if name not in registry:
        raise InvalidSettings(
            f"setting 'log_parser': swebench has no parser {name!r}; it has "
            f"{', '.join(sorted(registry))}"
        )
    found = registry[name](log, _Spec(instance_id, repo, version))
    known = set(Status)
    return {str(test): Status(status) for test, status in found.items() if status in known}


def load_registry() -> dict[str, Any]:
    """Return swebench's PARSER_REGISTRY."""
    if not is_installed():
        raise InvalidSettings(
            "setting 'log_parser': this parser needs the package swebench, which is not installed "
            "here; install it with: pip install --no-deps swebench"
        )
    with _shells():
        return dict(importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY)


@contextmanager
def _shells() -> Iterator[None]:
    """Let `swebench.harness.…` be imported without running the packages' own code."""
    kept = {name: module for name, module in sys.modules.items() if _is_swebench(name)}
    for name in kept:
        del sys.modules[name]
    spec = importlib.util.find_spec("swebench")
    roots = list(spec.submodule_search_locations or []) if spec else []
    try:
        for name in _SHELLS:
            shell = ModuleType(name)
            shell.__path__ = ["/".join([root, *name.split(".")[1:]]) for root in roots]
            sys.modules[name] = shell
        lacks_unidiff = importlib.util.find_spec("unidiff") is None
        if lacks_unidiff:  # a module beside the parsers wants it, to read patches
            sys.modules["unidiff"] = ModuleType("unidiff")
            vars(sys.modules["unidiff"])["PatchSet"] = None
        yield
        if lacks_unidiff:
            del sys.modules["unidiff"]
    finally:
        for name in [name for name in sys.modules if _is_swebench(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _is_swebench(name: str) -> bool:
    return name == "swebench" or name.startswith("swebench.")
