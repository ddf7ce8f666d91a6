"""Read a tool's settings: one typed reader, one kind of complaint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollouts.tools.base import InvalidToolSettings

MAX_BYTES = 16 * 1024**2
MAX_COUNT = 1_000_000


def read_seconds(tool: str, settings: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number of seconds above 0; raise `InvalidToolSettings`."""
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be above 0")
    return float(value)


def read_size(tool: str, settings: Mapping[str, Any], name: str, default: int) -> int:
    """Return a number of bytes from 256 to 16 MiB; raise `InvalidToolSettings`."""
    value = settings.get(name, default)
    if type(value) is not int or not 256 <= value <= MAX_BYTES:
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be 256 to 16 MiB")
    return value


def read_count(
    tool: str, settings: Mapping[str, Any], name: str, default: int, *, most: int = MAX_COUNT
) -> int:
    """Return a whole number from 1 to `most`; raise `InvalidToolSettings`."""
    value = settings.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be 1 to {most}")
    return value


def read_text(tool: str, settings: Mapping[str, Any], name: str, default: str) -> str:
    """Return a text that is not empty, or the default; raise `InvalidToolSettings`."""
    value = settings.get(name, default)
    if not isinstance(value, str) or (name in settings and not value.strip()):
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be a text")
    return value


def refuse_unknown(tool: str, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `InvalidToolSettings` when a setting has a name that the tool does not know."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise InvalidToolSettings(
            f"{tool}: unknown setting {unknown[0]!r}; known are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
