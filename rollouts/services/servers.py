"""Inference servers: register, drain, clear, list, health."""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Now

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.inference.adapters import AdapterRegistry, default_adapters
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import Health, Server
from rollouts.models import InferenceServer, Policy
from rollouts.states import ServerState
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 5.0
# One round of checks takes no longer, whatever the servers do; it stays below its period.
ROUND_SECONDS = 7.0
ROUND_THREADS = 32
LISTED_SECONDS = 1.0
_checking = threading.Lock()


@lru_cache(maxsize=1)
def adapters() -> AdapterRegistry:
    """Return the adapters of this process; they keep their connections."""
    return default_adapters()


def as_server(row: InferenceServer) -> Server:
    """Return what the inference layer needs to know of a server."""
    return Server(
        id=str(row.id),
        url=row.url.rstrip("/"),
        kind=row.kind,
        model=row.policy.model,
        max_in_flight=row.max_in_flight,
    )


def register_server(
    *, policy: Policy, url: str, kind: str = "vllm", max_in_flight: int = 16
) -> InferenceServer:
    """Add a server to a policy's pool; one that is there already is set active again.

    Raises InvalidValue for an unknown kind. Whether it answers is checked right after, not before:
    a server may be registered while it starts.
    """
    if kind not in adapters():
        raise InvalidValue(f"Unknown kind {kind!r}; known: {', '.join(adapters())}.")
    url = url.rstrip("/").removesuffix("/v1")
    with transaction.atomic():
        found = (
            InferenceServer.objects.registered()
            .select_for_update()
            .filter(policy=policy, url=url)
            .first()
        )
        if found is not None:
            found.state = ServerState.ACTIVE
            found.kind = kind
            found.max_in_flight = max_in_flight
            found.save(update_fields=["state", "kind", "max_in_flight"])
    if found is None:
        try:
            with transaction.atomic():
                found = InferenceServer.objects.create(
                    policy=policy, url=url, kind=kind, max_in_flight=max_in_flight
                )
        except IntegrityError:
            raise StateConflict(
                "The same server is being registered by another call; try again."
            ) from None
    return found


def remove_server(*, server_id: UUID) -> None:
    """Send a server no new work; what runs there may finish. Raises NotThere."""
    won = (
        InferenceServer.objects.registered().filter(pk=server_id).update(state=ServerState.REMOVED)
    )
    if not won:
        raise NotThere("There is no such inference server.")


def clear_servers(*, policies: Iterable[Policy]) -> int:
    """Remove all servers of some policies; return how many."""
    servers = InferenceServer.objects.registered().filter(policy__in=policies)
    return servers.update(state=ServerState.REMOVED)


@dataclass(frozen=True)
class Routable:
    """The servers that may get a policy's requests, and its version; read at a monotonic time."""

    servers: tuple[Server, ...]
    version: int | None
    read_at: float


_listed: dict[int | UUID, Routable] = {}
_listing = threading.Lock()


def routable_servers(*, policy: Policy, since: float) -> Routable:
    """Return a policy's servers as read after the monotonic time `since`, and 1 s ago at most.

    Callers of one process share what is read; who waits must not ask the database each time.
    The connection goes back to the pool. `version` is None where there is no server.
    """
    with _listing:
        known = _listed.get(policy.pk)
        if known is not None and known.read_at >= max(since, time.monotonic() - LISTED_SECONDS):
            return known
        began = time.monotonic()
        try:
            rows = list(
                InferenceServer.objects.routable().filter(policy=policy).select_related("policy")
            )
        finally:
            release_connection()
        servers = tuple(as_server(row) for row in rows)
        found = Routable(servers, rows[0].policy.version if rows else None, began)
        _listed[policy.pk] = found
        return found


def check_servers() -> int:
    """Ask every registered server for its health and write it down; return how many are well.

    All at once, within `ROUND_SECONDS`; those that were not asked in time come first in the next
    round. No connection is held while servers are asked. One round at a time in a process: a
    second call returns 0 at once.
    """
    if not _checking.acquire(blocking=False):
        return 0
    try:
        return _check_round()
    finally:
        _checking.release()


def _check_round() -> int:
    longest_ago = F("checked_at").asc(nulls_first=True)
    rows = list(InferenceServer.objects.registered().select_related("policy").order_by(longest_ago))
    release_connection()
    if not rows:
        return 0
    pool = ThreadPoolExecutor(min(len(rows), ROUND_THREADS), thread_name_prefix="health")
    try:
        asked = {pool.submit(_ask, as_server(row)): row for row in rows}
        done, late = wait(asked, timeout=ROUND_SECONDS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if late:
        logger.warning("%d of %d servers were not checked in time", len(late), len(rows))
    return sum(_note(asked[future], future.result()) for future in done)


def _ask(server: Server) -> Health:
    try:
        return adapters()[server.kind].health(server, timeout_seconds=HEALTH_TIMEOUT_SECONDS)
    except InferenceFault as fault:
        return Health(False, f"{fault.code}: {fault}")


def _note(row: InferenceServer, health: Health) -> bool:
    InferenceServer.objects.filter(pk=row.pk).update(
        healthy=health.ok, detail=health.detail[:2000], checked_at=Now()
    )
    return health.ok
