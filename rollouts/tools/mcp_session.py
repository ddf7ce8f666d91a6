"""One open session with an MCP server, for one episode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.tools.background import CLEANUP_SECONDS, Background, background
from rollouts.tools.mcp_servers import McpServer
from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.exceptions import RuntimeMissing

if TYPE_CHECKING:
    from mcp import Client

logger = logging.getLogger(__name__)

MAX_LISTED = 500
Cancelled = Callable[[], bool]


class McpFailed(Exception):
    """Say that a server cannot be reached, or went away."""


class McpRefused(Exception):
    """Say that a server answered a call with an error of the protocol."""


class McpSession:
    """Reach one server; opened at first use, opened anew once when it is found dead.

    One thread at a time. A server that is a command runs as `account` when this process is root,
    with none of this process's variables, and ends with the session.
    """

    def __init__(self, server: McpServer, *, account: str | None = None) -> None:
        self.server = server
        self._account = account
        self._loop: Background = background()
        self._client: Client | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closing: asyncio.Event | None = None

    def list_tools(self, *, cancelled: Cancelled = lambda: False) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool; raises `McpFailed`."""
        seconds = self.server.start_seconds
        found: list[dict[str, Any]] = self._ask(_list, seconds, cancelled)
        return found

    def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        timeout_seconds: float,
        cancelled: Cancelled = lambda: False,
    ) -> dict[str, Any]:
        """Return {"text", "failed"} of one call.

        Raises `McpFailed`, `McpRefused`, `CallCancelled`, and TimeoutError after
        `timeout_seconds`: a call that took too long is not made again.
        """

        async def ask(client: Client) -> dict[str, Any]:
            return _answer(await client.call_tool(tool, dict(arguments)))

        answer: dict[str, Any] = self._ask(ask, timeout_seconds, cancelled)
        return answer

    def close(self) -> None:
        """End the session and its server; idempotent, raises nothing."""
        if self._serving is None:
            return
        try:
            self._loop.run(self._end(), timeout_seconds=CLEANUP_SECONDS)
        except Exception:
            logger.warning("MCP server %s did not end cleanly", self.server.name, exc_info=True)

    def _ask(self, ask: Callable[[Client], Any], seconds: float, cancelled: Cancelled) -> Any:
        for again in (True, False):
            try:
                if self._client is None:
                    start = self.server.start_seconds
                    self._loop.run(self._open(), timeout_seconds=start, cancelled=cancelled)
                return self._loop.run(
                    self._guarded(ask), timeout_seconds=seconds, cancelled=cancelled
                )
            except McpFailed:
                self.close()
                if not again:
                    raise
            except TimeoutError as error:
                if self._client is None:
                    self.close()
                    raise McpFailed(f"it did not start: {error}") from error
                raise
        raise AssertionError("unreachable")

    async def _guarded(self, ask: Callable[[Client], Any]) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        assert self._client is not None
        try:
            return await ask(self._client)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or (self._serving and self._serving.done()):
                raise McpFailed(str(error)) from error
            raise McpRefused(str(error)) from error
        except Exception as error:  # the transports raise what they find
            raise McpFailed(f"{type(error).__name__}: {error}") from error

    async def _open(self) -> None:
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(opened, self._closing))
        try:
            self._client = await asyncio.shield(opened)
        except asyncio.CancelledError:
            opened.cancel()
            self._serving.cancel()
            await self._end()
            raise

    async def _serve(self, opened: asyncio.Future[Client], closing: asyncio.Event) -> None:
        """Hold the client open: the task that opens it must be the one that closes it."""
        try:
            async with _client(self.server, self._account) as client:
                opened.set_result(client)
                await closing.wait()
        except BaseException as error:
            if opened.done():
                logger.info("the session with MCP server %s broke: %s", self.server.name, error)
            else:
                opened.set_exception(McpFailed(f"it could not be opened: {_innermost(error)}"))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _end(self) -> None:
        serving, closing = self._serving, self._closing
        self._client = self._serving = self._closing = None
        if serving is None or closing is None:
            return
        closing.set()
        done, _ = await asyncio.wait([serving], timeout=CLEANUP_SECONDS / 2)
        if not done:
            serving.cancel()
            await asyncio.wait([serving], timeout=CLEANUP_SECONDS / 2)


@contextlib.asynccontextmanager
async def _client(server: McpServer, account: str | None) -> AsyncIterator[Client]:
    # Costs a second of import that an environment without MCP does not need.
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with contextlib.AsyncExitStack() as stack:
        if server.url:
            http = create_mcp_http_client(headers=dict(server.headers))
            transport = streamable_http_client(
                server.url, http_client=await stack.enter_async_context(http)
            )
        else:
            command, env = launch(server, account)
            parameters = StdioServerParameters(
                command=command[0],
                args=command[1:],
                env=env,
                cwd=server.cwd,
                encoding_error_handler="replace",
            )
            silent = Path(os.devnull).open("w")  # noqa: SIM115 - the stack closes it
            stack.callback(silent.close)
            transport = stdio_client(parameters, errlog=silent)
        yield await stack.enter_async_context(Client(transport))


def launch(server: McpServer, account: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and the variables of a server that is a command.

    Raises `McpFailed` when this process is root and there is no account to drop to.
    """
    try:
        owner = resolve_account(account)
    except RuntimeMissing as fault:
        raise McpFailed(str(fault)) from fault
    # These replace the few variables that the package would pass on from this process.
    env = {
        "HOME": "/",
        "LOGNAME": owner.name,
        "PATH": os.defpath,
        "SHELL": "/bin/sh",
        "TERM": "dumb",
        "USER": owner.name,
        **server.env,
    }
    drop = ["setpriv", "--no-new-privs"]
    if os.geteuid() == 0:
        drop += [f"--reuid={owner.uid}", f"--regid={owner.gid}", "--clear-groups"]
        drop += ["--bounding-set=-all", "--inh-caps=-all"]
    return [*drop, "--", *server.command], env


async def _list(client: Client) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor or len(tools) > MAX_LISTED:
            return tools[:MAX_LISTED]


def _answer(result: Any) -> dict[str, Any]:
    """Return what a result says as text; what is not text is named."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [str(result.structured_content)]
    return {"text": "\n".join(parts), "failed": bool(result.is_error)}


def _part(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return f"[{block.type}: {getattr(block, 'mime_type', None) or 'not shown'}]"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
