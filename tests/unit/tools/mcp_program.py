"""A small MCP server: `python -m tests.unit.tools.mcp_program [--http]`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(name="who.am i")
def who() -> str:
    """Tell uid, groups and the names of all variables."""
    return f"{os.getuid()} {os.getgroups()} {sorted(os.environ)}"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def die(mark: str) -> str:
    """End the server at the first call; the mark tells the second one."""
    path = Path(mark)
    if path.exists():
        return "alive again"
    path.write_text("")
    os._exit(3)


@server.tool()
async def wait() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def count(path: str) -> str:
    """Count the calls."""
    with Path(path).open("a") as file:
        file.write("x")
    return Path(path).read_text()


def main() -> None:
    """Serve over stdio, or over HTTP on a free port of the loopback, whose address is printed."""
    if sys.argv[1:] != ["--http"]:
        server.run("stdio")
        return
    import uvicorn  # needed here alone, and slow

    config = uvicorn.Config(server.streamable_http_app(), port=0, log_level="error")
    serving = uvicorn.Server(config)
    socket = config.bind_socket()
    print(f"http://127.0.0.1:{socket.getsockname()[1]}/mcp", flush=True)
    serving.run(sockets=[socket])


if __name__ == "__main__":
    main()
