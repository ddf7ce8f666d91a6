"""Search the web from the worker; the sandbox itself reaches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollouts.tools.background import CallCancelled, background
from rollouts.tools.base import (
    InvalidArguments,
    InvalidToolSettings,
    Tool,
    ToolContext,
    ToolResult,
)
from rollouts.tools.cassettes import Cassettes, NotRecorded
from rollouts.tools.counting import CallBudget, bounded
from rollouts.tools.host import HostAccess
from rollouts.tools.search_providers import (
    SearchFailed,
    SearchProvider,
    SearchResult,
    find_provider,
)
from rollouts.tools.settings import (
    read_count,
    read_seconds,
    read_size,
    read_text,
    refuse_unknown,
)
from sandboxes.network.allow_list import InvalidPattern, parse_pattern

MAX_QUERY_CHARACTERS = 1_000
MAX_RESULTS = 20
_KNOWN = frozenset(
    {"provider", "url", "max_calls", "results", "timeout_seconds", "output_bytes"},
)


class WebSearchTool(Tool):
    """Offer a web search of `max_calls` calls an episode.

    A call is asked once more when the server cannot be reached, within `timeout_seconds` and what
    the episode has left. What goes wrong outside is an observation, never a fault.
    """

    name = "web_search"
    description = "Search the web: you see title, address and a few lines of each result."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_QUERY_CHARACTERS,
                "description": "What to search for.",
            }
        },
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        provider: SearchProvider,
        *,
        cassettes: Cassettes,
        max_calls: int = 20,
        results: int = 5,
        timeout_seconds: float = 20.0,
        output_bytes: int = 8_192,
    ) -> None:
        self._provider = provider
        self._cassettes = cassettes
        self._budget = CallBudget(max_calls)
        self._results = results
        self.timeout_seconds = timeout_seconds
        self.output_bytes = output_bytes

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Search, or replay a search."""
        self.check(arguments)
        query = " ".join(arguments["query"].split())
        if not query:
            raise InvalidArguments("The query is empty.")
        if not self._budget.take():
            return self._failed(self._budget.spent(self.name), "limit")
        key = {"query": query, "results": self._results}
        seconds = min(self.timeout_seconds, context.timeout_seconds)

        def ask() -> dict[str, Any]:
            hits = background().run(
                self._ask(query), timeout_seconds=seconds, cancelled=context.cancelled
            )
            return {"results": [hit.as_dict() for hit in hits]}

        try:
            answer = self._cassettes.answer(self.name, key, ask)
            hits = [SearchResult(**hit) for hit in answer["results"]]
        except NotRecorded as error:
            return self._failed(f"The search has no answer: {error}.", "not_recorded")
        except (KeyError, TypeError):
            return self._failed("The search has no answer: its record is unreadable.", "record")
        except SearchFailed as error:
            return self._failed(f"The search server did not help: {error}.", "unreachable")
        except TimeoutError:
            return self._failed(f"The search gave no answer in {seconds:g} seconds.", "timeout")
        except CallCancelled:
            return self._failed("The search was cancelled.", "cancelled")
        text, truncated = bounded(describe(hits), self.output_bytes)
        data = {
            "failed": False,
            "reason": "",
            "truncated": truncated,
            "calls": self._budget.used,
            "urls": [hit.url for hit in hits],
        }
        return ToolResult(content=text, data=data)

    def count_made(self, arguments: Mapping[str, Any]) -> None:
        """Count it as `call` does."""
        if arguments["query"].strip():
            self._budget.take()

    async def _ask(self, query: str) -> Sequence[SearchResult]:
        try:
            return await self._provider.search(query, count=self._results)
        except SearchFailed as fault:
            if not fault.again:
                raise
        return await self._provider.search(query, count=self._results)

    def _failed(self, text: str, reason: str) -> ToolResult:
        return ToolResult(
            content=bounded(text, self.output_bytes)[0],
            data={
                "failed": True,
                "reason": reason,
                "truncated": False,
                "calls": self._budget.used,
                "urls": [],
            },
        )


def describe(hits: Sequence[SearchResult]) -> str:
    """Return the hits as the policy reads them."""
    if not hits:
        return "No results."
    shown = []
    for number, hit in enumerate(hits, start=1):
        title = " ".join(hit.title.split()) or hit.url
        shown.append(f"{number}. {title}\n{hit.url}\n{hit.snippet.strip()}".rstrip())
    return "\n\n".join(shown)


def make_web_search(settings: Mapping[str, Any], host: HostAccess) -> WebSearchTool:
    """Return the tool for an environment's settings; raise `InvalidToolSettings`.

    `url` names a server that must be on the operator's list; without it the operator's own is
    asked.
    """
    name = WebSearchTool.name
    refuse_unknown(name, settings, _KNOWN)
    url = read_text(name, settings, "url", host.search_url)
    if not url and host.cassettes.mode != "replay":
        raise InvalidToolSettings(f"{name}: set url, or PRORL_SEARCH_URL for every environment")
    if url and url != host.search_url:
        _check_allowed(url, host.search_hosts)
    make = find_provider(read_text(name, settings, "provider", "searxng"))
    return WebSearchTool(
        make(url),
        cassettes=host.cassettes,
        max_calls=read_count(name, settings, "max_calls", 20),
        results=read_count(name, settings, "results", 5, most=MAX_RESULTS),
        timeout_seconds=read_seconds(name, settings, "timeout_seconds", 20.0),
        output_bytes=read_size(name, settings, "output_bytes", 8_192),
    )


def _check_allowed(url: str, hosts: Sequence[str]) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        patterns = [parse_pattern(host) for host in hosts]
    except (ValueError, InvalidPattern) as error:
        raise InvalidToolSettings(f"web_search: url is {url!r}: {error}") from error
    host = (parts.hostname or "").lower()
    if not port or not host or parts.username or parts.query or parts.fragment:
        raise InvalidToolSettings(f"web_search: url is {url!r}; write it like http://search:8080")
    if not any(pattern.allows(host, port) for pattern in patterns):
        allowed = ", ".join(hosts) or "none"
        raise InvalidToolSettings(
            f"web_search: {host}:{port} is not among the hosts that the operator allows: {allowed}"
        )
