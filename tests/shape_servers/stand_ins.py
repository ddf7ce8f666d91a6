"""Import a package's protocol modules without what else the package needs.

The modules that were fetched are the package's own; every other one, torch included, is a
stand-in whose names accept anything. Only for a process of its own: `sys.modules` is not the same
afterwards.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic_core import CoreSchema, core_schema


class StandIn:
    """Stand for any class, function or value; a field of this type takes anything."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_named: Any) -> Any:
        # As a decorator it leaves what it decorates.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __class_getitem__(cls, _item: Any) -> type:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.any_schema()


class _StandInModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str], sources: Path) -> None:
        self._roots = roots
        self._sources = sources

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a fetched module, else a stand-in for those of the packages named."""
        if name.partition(".")[0] not in self._roots:
            return None
        file = self._sources / f"{name.replace('.', '/')}.py"
        if file.is_file():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stand-in as it is."""


def install(roots: Sequence[str], sources: Path) -> None:
    """Serve these packages from the fetched sources and from stand-ins."""
    sys.meta_path.insert(0, _Finder(roots, sources))
