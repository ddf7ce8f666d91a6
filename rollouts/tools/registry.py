"""Make the tools that an environment lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollouts.tools.base import InvalidToolSettings, Tool, UnknownTool
from rollouts.tools.bash import BashTool
from rollouts.tools.submit import SubmitTool

NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def _make_bash(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("bash", settings, {"timeout_seconds", "output_bytes"})
    seconds = settings.get("timeout_seconds", 60.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise InvalidToolSettings(f"bash: timeout_seconds is {seconds!r}; it must be above 0")
    size = settings.get("output_bytes", 16_384)
    if type(size) is not int or not 256 <= size <= 16 * 1024**2:
        raise InvalidToolSettings(f"bash: output_bytes is {size!r}; it must be 256 to 16 MiB")
    return BashTool(timeout_seconds=float(seconds), output_bytes=size)


def _make_submit(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("submit", settings, set())
    return SubmitTool()


TOOLS: Mapping[str, Callable[[Mapping[str, Any]], Tool]] = MappingProxyType(
    {BashTool.name: _make_bash, SubmitTool.name: _make_submit}
)


def build_tools(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] = NO_SETTINGS
) -> dict[str, Tool]:
    """Return the named tools, each made with its settings.

    Raises `UnknownTool` for a name nobody knows and `InvalidToolSettings` for a wrong setting.
    """
    for name in (*names, *settings):
        if name not in TOOLS:
            raise UnknownTool(f"no tool {name!r}; known are {', '.join(sorted(TOOLS))}")
    return {name: TOOLS[name](settings.get(name, {})) for name in names}


def _refuse_unknown(tool: str, settings: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidToolSettings(
            f"{tool}: unknown setting {unknown[0]!r}; known are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
