"""What the operator lets tools reach from the worker, outside of every sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollouts.tools.cassettes import Cassettes
from rollouts.tools.mcp_servers import McpServer


@dataclass(frozen=True, kw_only=True)
class HostAccess:
    """Hold the operator's settings of host-side tools.

    `search_url` is the search server where an environment names none; `search_hosts` are the
    hosts that one may name. `account` is whom MCP servers run as when the worker is root.
    """

    search_url: str = ""
    search_hosts: tuple[str, ...] = ()
    mcp_servers: Mapping[str, McpServer] = field(default_factory=dict)
    account: str | None = None
    cassettes: Cassettes = field(default_factory=Cassettes)


NO_HOST = HostAccess()
