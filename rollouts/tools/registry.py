"""Make the tools that an environment lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollouts.tools.base import InvalidToolSettings, Tool, UnknownTool
from rollouts.tools.bash import BashTool
from rollouts.tools.editor import EditorTool
from rollouts.tools.host import NO_HOST, HostAccess
from rollouts.tools.ipython import IPythonTool
from rollouts.tools.mcp_tools import PREFIX, McpReference, check_mcp, open_mcp
from rollouts.tools.search import WebSearchTool, make_web_search
from rollouts.tools.settings import read_seconds, read_size, refuse_unknown
from rollouts.tools.submit import SubmitTool
from rollouts.tools.think import ThinkTool

NO_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
MAX_DESCRIPTION_CHARACTERS = 20_000


def _make_bash(settings: Mapping[str, Any], _host: HostAccess) -> Tool:
    refuse_unknown("bash", settings, {"timeout_seconds", "output_bytes", "idle_seconds"})
    return BashTool(
        timeout_seconds=read_seconds("bash", settings, "timeout_seconds", 60.0),
        output_bytes=read_size("bash", settings, "output_bytes", 16_384),
        idle_seconds=read_seconds("bash", settings, "idle_seconds", 3.0),
    )


def _make_editor(settings: Mapping[str, Any], _host: HostAccess) -> Tool:
    refuse_unknown("editor", settings, {"output_bytes", "max_edit_bytes"})
    return EditorTool(
        output_bytes=read_size("editor", settings, "output_bytes", 16_384),
        max_edit_bytes=read_size("editor", settings, "max_edit_bytes", 4 * 1024**2),
    )


def _make_ipython(settings: Mapping[str, Any], _host: HostAccess) -> Tool:
    refuse_unknown("ipython", settings, {"timeout_seconds", "output_bytes"})
    return IPythonTool(
        timeout_seconds=read_seconds("ipython", settings, "timeout_seconds", 60.0),
        output_bytes=read_size("ipython", settings, "output_bytes", 16_384),
    )


def _make_submit(settings: Mapping[str, Any], _host: HostAccess) -> Tool:
    refuse_unknown("submit", settings, set())
    return SubmitTool()


def _make_think(settings: Mapping[str, Any], _host: HostAccess) -> Tool:
    refuse_unknown("think", settings, set())
    return ThinkTool()


Make = Callable[[Mapping[str, Any], HostAccess], Tool]
TOOLS: Mapping[str, Make] = MappingProxyType(
    {
        BashTool.name: _make_bash,
        EditorTool.name: _make_editor,
        IPythonTool.name: _make_ipython,
        SubmitTool.name: _make_submit,
        ThinkTool.name: _make_think,
        WebSearchTool.name: make_web_search,
    }
)


def build_tools(
    names: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]] = NO_SETTINGS,
    *,
    host: HostAccess = NO_HOST,
    call_seconds: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Tool]:
    """Return the named tools by the names that the policy calls, each made with its settings.

    Once for each episode; `close_tools` them in the end. `call_seconds` is the longest call of
    any tool, and what a tool of the sandbox gets that has no setting of its own. Raises as
    `check_tools`, `ToolUnavailable` when an MCP server does not answer, and `CallCancelled`.
    """
    check_tools(names, settings, host=host)
    tools: dict[str, Tool] = {}
    try:
        for name in dict.fromkeys(names):
            given, described = _given(name, settings)
            if name.startswith(PREFIX):
                made: Sequence[Tool] = open_mcp(
                    name, given, host, cancelled=cancelled, taken=tools.keys()
                )
            else:
                made = [TOOLS[name](given, host)]
            for tool in made:
                tools[tool.name] = tool
                tool.description = described or tool.description
                _bound(tool, given, call_seconds)
    except BaseException:
        close_tools(tools)
        raise
    return tools


def check_tools(
    names: Sequence[str],
    settings: Mapping[str, Any] = NO_SETTINGS,
    *,
    host: HostAccess = NO_HOST,
) -> None:
    """Check names and settings as far as it goes without asking any server.

    Raises `UnknownTool` for a name nobody knows and `InvalidToolSettings` for a wrong setting.
    """
    for name in (*names, *settings):
        if name not in TOOLS and not name.startswith(PREFIX):
            known = ", ".join(sorted([*TOOLS, *(f"mcp:{each}" for each in host.mcp_servers)]))
            raise UnknownTool(f"no tool {name!r}; known are {known}")
    for name in dict.fromkeys((*names, *settings)):
        given, _ = _given(name, settings)
        if name.startswith(PREFIX):
            check_mcp(name, given, host)
        elif name in names or name != WebSearchTool.name:
            TOOLS[name](given, host)


def close_tools(tools: Mapping[str, Tool]) -> None:
    """Close every tool."""
    for tool in tools.values():
        tool.close()


def _given(name: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a tool's own settings, and the description in place of its own, empty for none."""
    given = settings.get(name, {})
    if not isinstance(given, Mapping):
        raise InvalidToolSettings(f"{name}: its settings must be an object")
    own = dict(given)
    described = own.pop("description", None)
    if described is None:
        return own, ""
    if not isinstance(described, str) or not described.strip():
        raise InvalidToolSettings(f"{name}: description must be a text that is not empty")
    if len(described) > MAX_DESCRIPTION_CHARACTERS:
        raise InvalidToolSettings(
            f"{name}: description has more than {MAX_DESCRIPTION_CHARACTERS} characters"
        )
    if name.startswith(PREFIX) and McpReference.parse(name).tool is None:
        raise InvalidToolSettings(
            f"{name}: a description is one tool's: set it for {name}/<tool>, listed by itself"
        )
    return own, described


def _bound(tool: Tool, given: Mapping[str, Any], call_seconds: float | None) -> None:
    """Keep a tool's calls within the rollout's budget."""
    if call_seconds is None or not hasattr(tool, "timeout_seconds"):
        return
    outside = tool.name == WebSearchTool.name or not isinstance(tool, BashTool | IPythonTool)
    own = outside or "timeout_seconds" in given
    tool.timeout_seconds = min(tool.timeout_seconds, call_seconds) if own else call_seconds
