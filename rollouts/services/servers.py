"""Inference servers: register, drain, clear, health."""

from collections.abc import Iterable
from functools import lru_cache
from uuid import UUID

from django.db import IntegrityError, transaction
from django.utils import timezone

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.inference.adapters import AdapterRegistry, default_adapters
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import Server
from rollouts.models import InferenceServer, Policy
from rollouts.states import ServerState

HEALTH_TIMEOUT_SECONDS = 5.0


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


def check_servers() -> int:
    """Ask every registered server for its health and write it down; return how many are well."""
    well = 0
    for row in list(InferenceServer.objects.registered().select_related("policy")):
        well += check_server(row=row)
    return well


def check_server(*, row: InferenceServer) -> bool:
    """Ask one server for its health and write it down."""
    server = as_server(row)
    try:
        health = adapters()[server.kind].health(server, timeout_seconds=HEALTH_TIMEOUT_SECONDS)
        healthy, detail = health.ok, health.detail
    except InferenceFault as fault:
        healthy, detail = False, f"{fault.code}: {fault}"
    InferenceServer.objects.filter(pk=row.pk).update(
        healthy=healthy, detail=detail[:2000], checked_at=timezone.now()
    )
    return healthy
