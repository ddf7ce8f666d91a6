"""Inference servers: register, drain, clear, list, health."""

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef
from django.db.models.functions import Now

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.inference.adapters import AdapterRegistry, default_adapters
from rollouts.inference.control import control_for
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import Health, Server
from rollouts.models import InferenceServer, Policy, PolicyUpdate
from rollouts.states import ServerState
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECONDS = 5.0
VERSION_TIMEOUT_SECONDS = 2.0
# One round of checks takes no longer, whatever the servers do; it stays below its period.
ROUND_SECONDS = 7.0
ROUND_THREADS = 32
_checking = threading.Lock()


@lru_cache(maxsize=1)
def adapters() -> AdapterRegistry:
    """Return the adapters of this process; they keep their connections."""
    key = settings.OPENAI_API_KEY
    return default_adapters(api_keys=dict.fromkeys(settings.OPENAI_HOSTS, key) if key else None)


def as_server(row: InferenceServer) -> Server:
    """Return what the inference layer needs to know of a server."""
    return Server(
        id=str(row.id),
        url=row.url.rstrip("/"),
        kind=row.kind,
        model=row.policy.model,
        max_in_flight=row.max_in_flight,
        pool=str(row.policy_id),
        logprob_mode=row.logprob_mode or None,
    )


def register_server(
    *, policy: Policy, url: str, kind: str = "vllm", max_in_flight: int = 16
) -> InferenceServer:
    """Add a server to a policy's pool; one that is there already is set active again.

    Raises InvalidValue for an unknown kind, and for one that does not fit the policy. Whether it
    answers is checked right after, not before: a server may be registered while it starts.
    """
    if kind not in adapters():
        raise InvalidValue(f"Unknown kind {kind!r}; known: {', '.join(adapters())}.")
    check_kind(policy=policy, kind=kind)
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
            found.logprob_mode = ""
            found.told_version = None  # it may have begun anew
            fields = ["state", "kind", "max_in_flight", "logprob_mode", "told_version"]
            found.save(update_fields=fields)
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


def check_kind(*, policy: Policy, kind: str) -> None:
    """Raise InvalidValue when servers of a kind cannot serve a policy.

    A policy without a tokenizer needs servers that take messages, one with it those that take ids.
    """
    gives_tokens = hasattr(adapters()[kind], "generate")
    if policy.is_text_only and not hasattr(adapters()[kind], "chat"):
        raise InvalidValue(
            f"The policy {policy.name} has no tokenizer, so it is text only: its servers are of "
            f"kind 'openai', not {kind!r}."
        )
    if not policy.is_text_only and not gives_tokens:
        raise InvalidValue(
            f"Servers of kind {kind!r} give text alone; the policy {policy.name} has a tokenizer "
            "and needs token ids. Create a policy without a tokenizer for evaluation."
        )


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
    """Ask every registered server for its health and write it down; return how many are well.

    All at once, within `ROUND_SECONDS`; those that were not asked in time come first in the next
    round. No connection is held while servers are asked. One round at a time in a process: a
    second call returns 0 at once. A server that tells another version than its policy's gets no
    requests; nothing is sampled, and no version compared, while an update of it is open.
    """
    if not _checking.acquire(blocking=False):
        return 0
    try:
        return _check_round()
    finally:
        _checking.release()


def _check_round() -> int:
    longest_ago = F("checked_at").asc(nulls_first=True)
    updating = PolicyUpdate.objects.open().filter(policy_id=OuterRef("policy_id"))
    rows: list[Any] = list(
        InferenceServer.objects.registered()
        .select_related("policy")
        .annotate(updating=Exists(updating))
        .order_by(longest_ago)
    )
    release_connection()
    if not rows:
        return 0
    pool = ThreadPoolExecutor(min(len(rows), ROUND_THREADS), thread_name_prefix="health")
    try:
        asked = {pool.submit(_ask, replace(as_server(row), held=row.updating)): row for row in rows}
        done, late = wait(asked, timeout=ROUND_SECONDS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if late:
        logger.warning("%d of %d servers were not checked in time", len(late), len(rows))
    return sum(_note(asked[future], future.result()) for future in done)


def _ask(server: Server) -> Health:
    try:
        health = adapters()[server.kind].health(server, timeout_seconds=HEALTH_TIMEOUT_SECONDS)
    except InferenceFault as fault:
        return Health(False, f"{fault.code}: {fault}")
    if health.ok and not server.held and health.policy_version is None:
        return replace(health, policy_version=_told_version(server))
    return health


def _told_version(server: Server) -> int | None:
    control = control_for(server.kind)
    try:
        if control is not None:
            return control.weight_version(server, timeout_seconds=VERSION_TIMEOUT_SECONDS)
    except InferenceFault as fault:  # most servers do not offer it
        logger.debug("%s does not tell its version: %s", server.url, fault)
    return None


def _note(row: Any, health: Health) -> bool:
    """Write down what a check found of a server, a row annotated with `updating`."""
    found = {"logprob_mode": health.logprob_mode} if health.logprob_mode else {}
    detail, told, version = health.detail, health.policy_version, row.policy.version
    if health.ok and not row.updating:
        # An update that was completed meanwhile has asked the server after this check did.
        InferenceServer.objects.filter(
            pk=row.pk, policy__weights_epoch=row.policy.weights_epoch
        ).update(told_version=told)
        if told is not None and told != version:
            detail = f"tells version {told}, the policy is at {version}: no requests; {detail}"
    InferenceServer.objects.filter(pk=row.pk).update(
        healthy=health.ok, detail=detail[:2000], checked_at=Now(), **found
    )
    return health.ok
