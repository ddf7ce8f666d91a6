"""What an update does to a policy's servers: ask for their version, pause, resume, flush."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rollouts.inference.control import control_for
from rollouts.inference.exceptions import ControlRefused, InferenceFault
from rollouts.inference.protocol import Server
from rollouts.models import InferenceServer, Policy
from rollouts.services.servers import as_server
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

CONTROL_SECONDS = 10.0
ASK_SECONDS = 2.0
MAX_THREADS = 32
NOT_TOLD = "not told"
R = TypeVar("R")


@dataclass(frozen=True)
class ServerAnswer:
    """What one server said of its weights; `version` is None where it did not tell."""

    server: str
    url: str
    version: int | None
    said: str
    ok: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return asdict(self)


def versions(*, policy: Policy, expected: int) -> list[ServerAnswer]:
    """Ask every server of a policy which version it serves, all at once.

    One that does not tell passes as `not told`; one that cannot be asked does not.
    """

    def ask(server: Server) -> ServerAnswer:
        control = control_for(server.kind)
        version: int | None = None
        try:
            if control is not None:
                version = control.weight_version(server, timeout_seconds=CONTROL_SECONDS)
        except ControlRefused:
            version = None
        except InferenceFault as fault:
            return ServerAnswer(server.id, server.url, None, f"cannot be asked: {fault}", False)
        if version is None:
            return ServerAnswer(server.id, server.url, None, NOT_TOLD, True)
        return ServerAnswer(
            server.id, server.url, version, f"says version {version}", version == expected
        )

    return _each(_registered(policy), ask)


def weight_version(server: Server) -> int | None:
    """Return the version that a server says it serves now; None where it does not say."""
    control = control_for(server.kind)
    try:
        if control is not None:
            return control.weight_version(server, timeout_seconds=ASK_SECONDS)
    except InferenceFault as fault:
        logger.warning("%s was not asked for its version: %s", server.url, fault)
    return None


def pause_servers(servers: Sequence[InferenceServer], *, abort: bool) -> dict[str, str]:
    """Pause servers; return what failed, in words, by the server's id."""

    def pause(server: Server) -> str:
        control = _required(server)
        control.pause(server, abort=abort, timeout_seconds=CONTROL_SECONDS)
        return ""

    return _failures(servers, pause)


def resume_servers(servers: Sequence[InferenceServer]) -> dict[str, str]:
    """Let servers generate again; return what failed, in words, by the server's id."""

    def resume(server: Server) -> str:
        _required(server).resume(server, timeout_seconds=CONTROL_SECONDS)
        return ""

    return _failures(servers, resume)


def flush_servers(*, policy: Policy) -> list[str]:
    """Have every server forget its prefixes; return what failed: requests are salted anyway."""

    def flush(server: Server) -> str:
        _required(server).flush_cache(server, timeout_seconds=CONTROL_SECONDS)
        return ""

    failed = list(_failures(_registered(policy), flush).values())
    for each in failed:
        logger.warning("prefix cache not flushed: %s", each)
    return failed


def _required(server: Server) -> Any:
    control = control_for(server.kind)
    if control is None:
        raise ControlRefused(f"servers of kind {server.kind} cannot be controlled")
    return control


def _failures(rows: Sequence[InferenceServer], step: Callable[[Server], str]) -> dict[str, str]:
    def safely(server: Server) -> tuple[str, str]:
        try:
            return server.id, step(server)
        except InferenceFault as fault:
            return server.id, f"{server.url}: {fault}"

    return {server: failure for server, failure in _each(rows, safely) if failure}


def _registered(policy: Policy) -> list[InferenceServer]:
    """Return the servers that receive work or may again: those that are drained included."""
    rows = InferenceServer.objects.registered().filter(policy=policy)
    return list(rows.select_related("policy"))


def _each(rows: Sequence[InferenceServer], step: Callable[[Server], R]) -> list[R]:
    """Do a step for each server, all at once, holding no connection."""
    servers = [as_server(row) for row in rows]
    if not servers:
        return []
    release_connection()
    with ThreadPoolExecutor(min(len(servers), MAX_THREADS), thread_name_prefix="control") as pool:
        return list(pool.map(step, servers))
