"""What this deployment's settings let tools reach from a worker."""

from pathlib import Path

from django.conf import settings

from rollouts.tools.base import InvalidToolSettings
from rollouts.tools.cassettes import Cassettes
from rollouts.tools.host import HostAccess
from rollouts.tools.mcp_servers import read_mcp_servers


def host_access() -> HostAccess:
    """Return what host-side tools may reach; the file of MCP servers is read anew.

    Raises InvalidToolSettings when that file or the mode of recording is wrong.
    """
    folder = settings.TOOL_RECORDINGS
    try:
        cassettes = Cassettes(settings.TOOL_RECORDING, Path(folder) if folder else None)
    except ValueError as error:
        raise InvalidToolSettings(f"PRORL_TOOL_RECORDING: {error}") from error
    path = settings.MCP_SERVERS
    return HostAccess(
        search_url=settings.SEARCH_URL,
        search_hosts=tuple(settings.SEARCH_HOSTS),
        mcp_servers=read_mcp_servers(Path(path) if path else None),
        account=settings.MCP_ACCOUNT,
        cassettes=cassettes,
    )
