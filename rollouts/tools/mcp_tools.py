"""Offer the tools of MCP servers that the operator allows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
from referencing.exceptions import Unresolvable

from rollouts.tools.background import CallCancelled
from rollouts.tools.base import (
    InvalidToolSettings,
    Tool,
    ToolContext,
    ToolResult,
    ToolUnavailable,
    UnknownTool,
)
from rollouts.tools.cassettes import Cassettes, NotRecorded
from rollouts.tools.counting import CallBudget, bounded
from rollouts.tools.host import HostAccess
from rollouts.tools.mcp_session import McpFailed, McpRefused, McpSession
from rollouts.tools.settings import read_count, read_seconds, read_size, refuse_unknown

PREFIX = "mcp:"
MAX_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_KNOWN = frozenset({"timeout_seconds", "max_calls", "output_bytes"})


@dataclass(frozen=True)
class McpReference:
    """Name one server, or one tool of it, as an environment lists them."""

    server: str
    tool: str | None = None

    @classmethod
    def parse(cls, text: str) -> McpReference:
        """Read `mcp:<server>` or `mcp:<server>/<tool>`; raise `UnknownTool`."""
        server, slash, tool = text.removeprefix(PREFIX).partition("/")
        if not server or (slash and not tool):
            raise UnknownTool(f"{text!r} is no tool: write mcp:<server> or mcp:<server>/<tool>")
        return cls(server, tool or None)


class McpTool(Tool):
    """Pass calls on to one tool of an MCP server; `name` is safe for chat templates."""

    def __init__(
        self,
        listed: Mapping[str, Any],
        session: McpSession,
        *,
        cassettes: Cassettes,
        budget: CallBudget,
        timeout_seconds: float,
        output_bytes: int,
    ) -> None:
        self._tool = str(listed["name"])
        self._session = session
        self._cassettes = cassettes
        self._budget = budget
        self.timeout_seconds = timeout_seconds
        self.output_bytes = output_bytes
        self.name = safe_name(session.server.name, self._tool)
        self.description = str(listed["description"])
        self.parameters = dict(listed["parameters"])

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check as other tools do; a schema that cannot be used here is left to the server."""
        try:
            jsonschema.Draft202012Validator.check_schema(self.parameters)
            super().check(arguments)
        except (jsonschema.SchemaError, Unresolvable):
            return

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Ask the server, or the recording; what goes wrong outside is told to the policy."""
        self.check(arguments)
        if not self._budget.take():
            return self._failed(self._budget.spent(self.name), "limit")
        seconds = min(self.timeout_seconds, context.timeout_seconds)

        def ask() -> dict[str, Any]:
            return self._session.call(
                self._tool, arguments, timeout_seconds=seconds, cancelled=context.cancelled
            )

        key = f"{PREFIX}{self._session.server.name}/{self._tool}"
        try:
            answer = self._cassettes.answer(key, arguments, ask)
        except NotRecorded as error:
            return self._failed(f"{self.name} has no answer: {error}.", "not_recorded")
        except McpRefused as error:
            return self._failed(f"{self.name} refused the call: {error}", "refused")
        except McpFailed as error:
            return self._failed(f"{self.name} is not to be reached: {error}", "unreachable")
        except TimeoutError:
            return self._failed(f"{self.name} gave no answer in {seconds:g} seconds.", "timeout")
        except CallCancelled:
            return self._failed(f"{self.name} was cancelled.", "cancelled")
        text, truncated = bounded(str(answer.get("text", "")), self.output_bytes)
        failed = bool(answer.get("failed"))
        return ToolResult(
            content=f"[the tool says that it failed]\n{text}" if failed else text or "(no output)",
            data={
                "failed": failed,
                "reason": "tool" if failed else "",
                "truncated": truncated,
                "calls": self._budget.used,
            },
        )

    def count_made(self, arguments: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Count it as `call` does."""
        self._budget.take()

    def close(self) -> None:
        """End the session, which the server's other tools share."""
        self._session.close()

    def _failed(self, text: str, reason: str) -> ToolResult:
        return ToolResult(
            content=bounded(text, self.output_bytes)[0],
            data={
                "failed": True,
                "reason": reason,
                "truncated": False,
                "calls": self._budget.used,
            },
        )


def check_mcp(name: str, settings: Mapping[str, Any], host: HostAccess) -> McpReference:
    """Return what a name refers to, its settings checked; no server is asked.

    Raises `UnknownTool` when the operator allows no such server, and `InvalidToolSettings`.
    """
    reference = McpReference.parse(name)
    if reference.server not in host.mcp_servers:
        allowed = ", ".join(sorted(host.mcp_servers)) or "none"
        raise UnknownTool(f"no MCP server {reference.server!r} is allowed here; allowed: {allowed}")
    refuse_unknown(name, settings, _KNOWN)
    _limits(name, settings, host.mcp_servers[reference.server].timeout_seconds)
    return reference


def open_mcp(
    name: str,
    settings: Mapping[str, Any],
    host: HostAccess,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    taken: Collection[str] = (),
) -> list[McpTool]:
    """Return the tools that a name of an environment stands for, with a session of their own.

    Close any of them in the end. Raises as `check_mcp`, `ToolUnavailable` when the server does
    not tell its tools or lacks the one that is named, and `CallCancelled`.
    """
    reference = check_mcp(name, settings, host)
    server = host.mcp_servers[reference.server]
    seconds, most, size = _limits(name, settings, server.timeout_seconds)
    session = McpSession(server, account=host.account)
    budget = CallBudget(most)
    try:
        listed = _listed(session, host.cassettes, cancelled)
        wanted = [tool for tool in listed if reference.tool in (None, tool["name"])]
        if not wanted:
            raise ToolUnavailable(f"MCP server {server.name} has no tool {reference.tool!r}")
        tools = [
            McpTool(
                tool,
                session,
                cassettes=host.cassettes,
                budget=budget,
                timeout_seconds=seconds,
                output_bytes=size,
            )
            for tool in wanted
        ]
        names = [tool.name for tool in tools]
        if len({*names, *taken}) < len(names) + len(taken):
            raise InvalidToolSettings(f"{name}: a tool of this name is there already")
    except BaseException:
        session.close()
        raise
    return tools


def safe_name(server: str, tool: str) -> str:
    """Return `server__tool` in at most 64 letters, digits, `_` and `-`; other names differ too."""
    plain = f"{server}__{tool}"
    safe = _UNSAFE.sub("_", plain)
    if safe == plain and len(safe) <= MAX_NAME:
        return safe
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{safe[: MAX_NAME - 9]}_{digest}"


def _listed(
    session: McpSession, cassettes: Cassettes, cancelled: Callable[[], bool]
) -> list[dict[str, Any]]:
    name = session.server.name

    def ask() -> dict[str, Any]:
        return {"tools": session.list_tools(cancelled=cancelled)}

    try:
        listed: list[dict[str, Any]] = cassettes.answer(f"{PREFIX}{name}", {}, ask)["tools"]
    except (McpFailed, McpRefused, TimeoutError) as error:
        raise ToolUnavailable(f"MCP server {name} does not tell its tools: {error}") from error
    except (NotRecorded, KeyError) as error:
        raise ToolUnavailable(f"MCP server {name}: its tools were not recorded") from error
    return listed


def _limits(name: str, settings: Mapping[str, Any], seconds: float) -> tuple[float, int, int]:
    return (
        read_seconds(name, settings, "timeout_seconds", seconds),
        read_count(name, settings, "max_calls", 100),
        read_size(name, settings, "output_bytes", 16_384),
    )
