"""Find what plug-ins add by name: the built-in ones, entry points and dotted paths."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PluginRegistry(Mapping[str, T], ABC, Generic[T]):
    """Map names to what is there: the built-in ones, then plug-ins, loaded at the first look.

    A plug-in that cannot be loaded, or whose name is taken, is left out and told in `faults`;
    it takes nothing else with it. Thread-safe.
    """

    kind: str  # what is registered, in words
    setting: str  # the setting that names dotted paths
    invalid: type[Exception]  # what a refusal is
    built_in: Iterable[object]
    reserved: Sequence[str] = ()  # names that are the service's own

    def __init__(self, group: str) -> None:
        self._group = group
        self._paths: tuple[str, ...] = ()
        self._known: dict[str, T] = {}
        self._sources: dict[str, str] = {}
        self._faults: list[str] = []
        self._loaded = False
        self._lock = threading.RLock()

    @abstractmethod
    def check(self, candidate: object, source: str) -> tuple[str, T]:
        """Return the name and what is registered; raise `invalid` that names the source."""

    def __getitem__(self, name: str) -> T:
        """Return what has this name."""
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._all())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all())

    @property
    def faults(self) -> tuple[str, ...]:
        """Say which plug-ins were left out and why, a sentence each."""
        self._all()
        return tuple(self._faults)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the dotted paths that were configured."""
        return self._paths

    def configure(self, paths: Sequence[str]) -> None:
        """Name plug-ins by dotted path, `package.module.Class`; all are loaded anew."""
        with self._lock:
            self._paths = tuple(paths)
            self._loaded = False

    def register(self, candidate: object, *, source: str) -> None:
        """Add one; raise `invalid` that names the source."""
        with self._lock:
            name, made = self.check(candidate, source)
            if name in self._known or name in self.reserved:
                holder = self._sources.get(name, "the service")
                raise self.invalid(f"{source}: the name {name!r} is taken by {holder}")
            self._known[name] = made
            self._sources[name] = source

    def _all(self) -> dict[str, T]:
        with self._lock:
            if not self._loaded:
                self._loaded = True
                self._known, self._sources, self._faults = {}, {}, []
                for each in self.built_in:
                    self.register(each, source="the service")
                from importlib.metadata import entry_points  # 40 ms, for who wants all of them

                for point in sorted(entry_points(group=self._group), key=lambda p: p.name):
                    self._add(point.load, f"entry point {point.name} = {point.value}")
                for path in self._paths:
                    self._add(partial(imported, path), f"setting {self.setting}, {path}")
            return self._known

    def _add(self, load: Callable[[], object], source: str) -> None:
        try:
            self.register(load(), source=source)
        except self.invalid as fault:
            self._leave_out(str(fault))
        # A plug-in is foreign code: whatever it raises must not end the process.
        except Exception as error:
            self._leave_out(f"{source}: {type(error).__name__}: {error}")

    def _leave_out(self, reason: str) -> None:
        self._faults.append(reason)
        logger.error("%s left out: %s", self.kind, reason)


def imported(path: str) -> object:
    """Return what a dotted path, `package.module.Class`, stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
