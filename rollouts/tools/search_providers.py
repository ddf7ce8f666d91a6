"""Where web searches are answered: one class for each kind of server.

Another kind is an entry point of the group `prorl.search_providers`: a callable that takes the
server's address and returns a `SearchProvider`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Protocol

import httpx

from rollouts.tools.base import InvalidToolSettings

GROUP = "prorl.search_providers"
MAX_ANSWER_BYTES = 4 * 1024**2


class SearchFailed(Exception):
    """Say why a search server gave no answer; `again` tells whether asking once more may help."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Hold one hit."""

    title: str
    url: str
    snippet: str

    def as_dict(self) -> dict[str, str]:
        """Return the hit as JSON."""
        return asdict(self)


class SearchProvider(Protocol):
    """Search at one server; it is cancelled when it takes too long."""

    async def search(self, query: str, *, count: int) -> Sequence[SearchResult]:
        """Return at most `count` hits, the best first; raise `SearchFailed`."""
        ...


class SearxngProvider:
    """Ask a server that speaks SearXNG's JSON: `GET /search?q=…&format=json`.

    https://docs.searxng.org/dev/search_api.html. Redirects are not followed: they would lead past
    the operator's list of hosts.
    """

    def __init__(self, url: str) -> None:
        self._address = f"{url.rstrip('/')}/search"

    async def search(self, query: str, *, count: int) -> Sequence[SearchResult]:
        """Return the hits in the server's order."""
        found = await self._fetch({"q": query, "format": "json"})
        rows = found.get("results") if isinstance(found, dict) else None
        if not isinstance(rows, list):
            raise SearchFailed("its answer holds no list of results")
        hits = [_read_hit(row) for row in rows if isinstance(row, dict) and row.get("url")]
        return hits[:count]

    async def _fetch(self, parameters: Mapping[str, str]) -> Any:
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=None) as client,  # noqa: S113
                client.stream("GET", self._address, params=dict(parameters)) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    again = response.status_code in (429, 502, 503, 504)
                    raise SearchFailed(f"it answered {response.status_code}", again=again)
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise SearchFailed("its answer is too long")
        except httpx.HTTPError as error:
            raise SearchFailed(f"{type(error).__name__}: {error}", again=True) from error
        try:
            return json.loads(bytes(body))
        except (ValueError, RecursionError) as error:
            raise SearchFailed("its answer is not JSON") from error


def _read_hit(row: Mapping[str, Any]) -> SearchResult:
    return SearchResult(
        title=str(row.get("title") or ""),
        url=str(row["url"]),
        snippet=str(row.get("content") or ""),
    )


PROVIDERS: Mapping[str, Callable[[str], SearchProvider]] = MappingProxyType(
    {"searxng": SearxngProvider}
)


def find_provider(name: str) -> Callable[[str], SearchProvider]:
    """Return what makes a provider of a server's address; raise `InvalidToolSettings`."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted({*PROVIDERS, *installed}))
        raise InvalidToolSettings(f"web_search: provider is {name!r}; it must be one of {known}")
    made: Callable[[str], SearchProvider] = installed[name].load()
    return made
