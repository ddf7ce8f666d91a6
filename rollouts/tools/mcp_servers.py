"""Which MCP servers the operator allows: one TOML or JSON file, by name."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollouts.tools.base import InvalidToolSettings
from rollouts.tools.settings import read_seconds, refuse_unknown

SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_KNOWN = frozenset({"command", "url", "env", "headers", "cwd", "timeout_seconds", "start_seconds"})


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """Name one server: a `command` that speaks over stdio, or the `url` of a streamable HTTP one.

    `env` is all that a command gets beside its account's own variables; `headers` go with each
    request to a url. `timeout_seconds` bounds a call, `start_seconds` opening and listing.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    timeout_seconds: float = 60.0
    start_seconds: float = 30.0


def read_mcp_servers(path: Path | None) -> dict[str, McpServer]:
    """Return the servers of a file by name, none without a file.

    Each table holds `command` (a list) or `url`, and the other fields of `McpServer`. Raises
    `InvalidToolSettings`.
    """
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidToolSettings(f"the MCP servers in {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidToolSettings(f"{path} must hold one table for each MCP server")
    return {name: _read_server(name, table) for name, table in found.items()}


def _read_server(name: str, table: Any) -> McpServer:
    where = f"MCP server {name!r}"
    if not SERVER_NAME.fullmatch(name):
        raise InvalidToolSettings(f"{where}: a name is up to 40 letters, digits, _ and -")
    if not isinstance(table, dict):
        raise InvalidToolSettings(f"{where} must be a table")
    refuse_unknown(where, table, _KNOWN)
    command, url = table.get("command", []), table.get("url", "")
    if not _texts(command) or not isinstance(url, str) or bool(command) == bool(url):
        raise InvalidToolSettings(f"{where}: give either command, a list of texts, or url")
    if url and (urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname):
        raise InvalidToolSettings(
            f"{where}: url is {url!r}; it must begin with http:// or https://"
        )
    for key in ("env", "headers"):
        given = table.get(key, {})
        if not isinstance(given, dict) or not _texts([*given, *given.values()]):
            raise InvalidToolSettings(f"{where}: {key} must be a table of texts")
    cwd = table.get("cwd", "/")
    if not isinstance(cwd, str) or not cwd.startswith("/"):
        raise InvalidToolSettings(f"{where}: cwd is {cwd!r}; it must be an absolute path")
    return McpServer(
        name=name,
        command=tuple(command),
        url=url,
        env=dict(table.get("env", {})),
        headers=dict(table.get("headers", {})),
        cwd=cwd,
        timeout_seconds=read_seconds(where, table, "timeout_seconds", 60.0),
        start_seconds=read_seconds(where, table, "start_seconds", 30.0),
    )


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) and "\0" not in v for v in values)
