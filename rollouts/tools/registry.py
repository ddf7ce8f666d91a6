"""Make the tools that an environment lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollouts.tools.base import InvalidToolSettings, Tool, UnknownTool
from rollouts.tools.bash import BashTool
from rollouts.tools.editor import EditorTool
from rollouts.tools.ipython import IPythonTool
from rollouts.tools.submit import SubmitTool
from rollouts.tools.think import ThinkTool

NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def _make_bash(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("bash", settings, {"timeout_seconds", "output_bytes", "idle_seconds"})
    return BashTool(
        timeout_seconds=_read_seconds("bash", settings, "timeout_seconds", 60.0),
        output_bytes=_read_size("bash", settings, "output_bytes", 16_384),
        idle_seconds=_read_seconds("bash", settings, "idle_seconds", 3.0),
    )


def _make_editor(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("editor", settings, {"output_bytes", "max_edit_bytes"})
    return EditorTool(
        output_bytes=_read_size("editor", settings, "output_bytes", 16_384),
        max_edit_bytes=_read_size("editor", settings, "max_edit_bytes", 4 * 1024**2),
    )


def _make_ipython(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("ipython", settings, {"timeout_seconds", "output_bytes"})
    return IPythonTool(
        timeout_seconds=_read_seconds("ipython", settings, "timeout_seconds", 60.0),
        output_bytes=_read_size("ipython", settings, "output_bytes", 16_384),
    )


def _make_submit(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("submit", settings, set())
    return SubmitTool()


def _make_think(settings: Mapping[str, Any]) -> Tool:
    _refuse_unknown("think", settings, set())
    return ThinkTool()


TOOLS: Mapping[str, Callable[[Mapping[str, Any]], Tool]] = MappingProxyType(
    {
        BashTool.name: _make_bash,
        EditorTool.name: _make_editor,
        IPythonTool.name: _make_ipython,
        SubmitTool.name: _make_submit,
        ThinkTool.name: _make_think,
    }
)


def build_tools(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] = NO_SETTINGS
) -> dict[str, Tool]:
    """Return the named tools, each made with its settings; once for each episode.

    Raises `UnknownTool` for a name nobody knows and `InvalidToolSettings` for a wrong setting.
    """
    for name in (*names, *settings):
        if name not in TOOLS:
            raise UnknownTool(f"no tool {name!r}; known are {', '.join(sorted(TOOLS))}")
    return {name: TOOLS[name](settings.get(name, {})) for name in names}


def _read_seconds(tool: str, settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be above 0")
    return float(value)


def _read_size(tool: str, settings: Mapping[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    if type(value) is not int or not 256 <= value <= 16 * 1024**2:
        raise InvalidToolSettings(f"{tool}: {name} is {value!r}; it must be 256 to 16 MiB")
    return value


def _refuse_unknown(tool: str, settings: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        raise InvalidToolSettings(
            f"{tool}: unknown setting {unknown[0]!r}; known are "
            f"{', '.join(sorted(known)) or 'none'}"
        )
