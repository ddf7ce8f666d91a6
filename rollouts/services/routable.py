"""What requests of a policy go by: its servers, its version and its open update, as read last."""

import logging
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection

from rollouts.inference.keeping import Keeper
from rollouts.inference.protocol import Server
from rollouts.models import Policy
from rollouts.states import HOLDS_CALLS, OPEN_UPDATE, ServerState, UpdateMode
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

LISTED_SECONDS = 1.0


@dataclass(frozen=True)
class Routable:
    """The servers that may get a policy's requests, and its version; read at a monotonic time."""

    servers: tuple[Server, ...]
    version: int | None
    read_at: float
    # The update that is open, as its id and mode.
    update: tuple[UUID, str] | None = None
    # The number of the last update that let requests run while weights were exchanged, 0 for none.
    unheld: int = 0
    # Rises whenever the weights may have changed.
    epoch: int = 0

    def exchanges_now(self) -> bool:
        """Tell whether weights may be exchanged at any moment under a running request."""
        return self.update is not None and self.update[1] == UpdateMode.NONE

    def holds_requests(self) -> bool:
        """Tell whether the open update lets no request begin, or left no server to ask."""
        return self.update is not None and (self.update[1] in HOLDS_CALLS or not self.servers)


_listed: dict[int | UUID, Routable] = {}
_listing = threading.Lock()


def routable_servers(*, policy: Policy, since: float) -> Routable:
    """Return a policy's servers as read after the monotonic time `since`, and 1 s ago at most.

    Callers of one process share what is read; who waits must not ask the database each time.
    The connection goes back to the pool. What is said of the policy does not depend on there being
    a server; `version` is None where the policy is gone. A server that told another version is
    left out, but while an update is open: then both may be right.
    """
    known = _known(policy, since)
    if known is not None:
        return known
    with _listing:
        known = _known(policy, since)
        if known is not None:
            return known
        began = time.monotonic()
        try:
            found = _read_policy(policy, began)
        finally:
            release_connection()
        _listed[policy.pk] = found
        return found


def last_read(*, policy: Policy) -> Routable | None:
    """Return what was read last of a policy: from memory, at once."""
    return _listed.get(policy.pk)


def watched(policy: Policy) -> AbstractContextManager[Policy]:
    """Have `last_read` be a second old at most inside, where the database answers."""
    return _watch.keeping(policy)


def _known(policy: Policy, since: float) -> Routable | None:
    known = _listed.get(policy.pk)
    oldest = max(since, time.monotonic() - LISTED_SECONDS)
    return known if known is not None and known.read_at >= oldest else None


def _read_watched(policies: list[Policy]) -> None:
    for policy in {each.pk: each for each in policies}.values():
        try:
            routable_servers(policy=policy, since=0.0)
        except DatabaseError as error:
            logger.warning("the policy %s cannot be read: %s", policy.name, error)


_watch: Keeper[Policy] = Keeper("policies", _read_watched, period_seconds=LISTED_SECONDS)

# Plain SQL, as it is read about once a turn: the ORM took 3 ms to make it, of 0.3 ms for all of it.
# One statement, so that a policy, its open update and its servers fit together.
_READ = """
SELECT policy.model, policy.version, policy.weights_epoch, open.id, open.mode,
    (
        SELECT max(number) FROM rollouts_policyupdate
        WHERE policy_id = policy.id AND mode = %(unheld)s
    ),
    server.id, server.url, server.kind, server.max_in_flight, server.told_version,
    server.logprob_mode
FROM rollouts_policy AS policy
LEFT JOIN rollouts_policyupdate AS open
    ON open.policy_id = policy.id AND open.state = ANY(%(open)s)
LEFT JOIN rollouts_inferenceserver AS server
    ON server.policy_id = policy.id AND server.state = %(active)s
WHERE policy.id = %(policy)s
ORDER BY server.created_at
"""


def _read_policy(policy: Policy, began: float) -> Routable:
    values: dict[str, Any] = {
        "policy": policy.pk,
        "unheld": UpdateMode.NONE.value,
        "open": [state.value for state in OPEN_UPDATE],
        "active": ServerState.ACTIVE.value,
    }
    with connection.cursor() as cursor:
        cursor.execute(_READ, values)
        rows = cursor.fetchall()
    if not rows:
        return Routable((), None, began)
    model, version, epoch, update_id, update_mode, unheld = rows[0][:6]
    servers = [
        Server(
            id=str(server_id),
            url=url.rstrip("/"),
            kind=kind,
            model=model,
            max_in_flight=max_in_flight,
            pool=str(policy.pk),
            logprob_mode=logprob_mode or None,
        )
        for server_id, url, kind, max_in_flight, told, logprob_mode in (row[6:] for row in rows)
        if server_id is not None and (update_id is not None or told in (None, version))
    ]
    update = None if update_id is None else (update_id, update_mode)
    return Routable(tuple(servers), version, began, update, unheld or 0, epoch)
