"""The dispatcher: it decides order, and publishes only what free slots can start."""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from rollouts.models import Attempt, Rollout, Worker
from rollouts.services.attempts import open_attempt
from rollouts.services.deadlines import mark_started
from rollouts.services.end import end_rollout
from rollouts.states import AttemptState, Event, Outcome, RolloutState, Stage, target
from rollouts.text import clean_text
from sandboxes.models import Node
from sandboxes.services.lifecycle import reserve_sandbox
from sandboxes.states import SandboxPurpose

LOCK_KEY = 7_201_001
MAX_PER_ROUND = 500
BREAKER_FAILURES = 5
BREAKER_SECONDS = 20.0
BREAKER_WINDOW = 1000

logger = logging.getLogger(__name__)

# Per active experiment the first queued rollouts by index, then all of them: evaluation before
# training, then by priority and by (what the experiment has running + its place in line) / share:
# weighted fair sharing. What waits for a snapshot's node without a free slot is left out: however
# much it is, the rest goes on.
_CANDIDATES = """
SELECT line.id
FROM rollouts_experiment AS experiment
CROSS JOIN LATERAL (
    SELECT count(*) AS running FROM rollouts_rollout
    WHERE experiment_id = experiment.id AND state IN ('init', 'run', 'eval')
) AS load
CROSS JOIN LATERAL (
    SELECT id, priority, sequence, sample,
           row_number() OVER (ORDER BY priority DESC, sequence, sample) AS place
    FROM rollouts_rollout
    WHERE experiment_id = experiment.id AND state = 'queued' AND needs_sandbox = %(sandbox)s
      AND (not_before IS NULL OR not_before <= %(now)s)
      AND NOT EXISTS (
          SELECT FROM rollouts_group AS own JOIN sandboxes_snapshot AS base
          ON base.id = own.snapshot_id
          WHERE own.id = group_id AND base.node_id <> ALL(%(nodes)s)
      )
    ORDER BY priority DESC, sequence, sample
    LIMIT %(limit)s
) AS line
WHERE experiment.state = 'active'
  AND NOT EXISTS (
      SELECT FROM rollouts_policyupdate AS policy_update
      WHERE policy_update.policy_id = experiment.policy_id
        AND policy_update.mode = 'drain-rollouts'
        AND policy_update.state IN ('quiescing', 'ready')
  )
ORDER BY experiment.purpose = 'evaluation' DESC, line.priority DESC,
         (load.running + line.place)::float / experiment.share, line.sequence, line.sample
LIMIT %(limit)s
"""


def dispatch() -> int:
    """Start as many queued rollouts as there are free slots; return how many.

    Holds a transaction-level advisory lock: a second dispatcher at the same time does nothing.
    """
    now = timezone.now()
    started: list[UUID] = []  # the group of each
    with transaction.atomic():
        if not _only_dispatcher():
            return 0
        slots = _free_slots()
        free = sum(slots.values())
        # More than there are slots: those that wait for another node must not hold up the rest.
        ready = [node.pk for node, count in slots.items() if count > 0]
        taken = list(_take(2 * free, sandbox=True, now=now, nodes=ready))
        failed_on = _nodes_that_failed(taken)
        for rollout in taken:
            if free == len(started):
                break
            # What starts from a snapshot goes where the snapshot is.
            snapshot = rollout.group.snapshot
            there = slots if snapshot is None else _only(slots, snapshot.node_id)
            node = _choose(there, failed_on.get(rollout.pk, set()))
            if node is None:
                continue
            slots[node] -= 1
            if _start_safely(rollout, node):
                started.append(rollout.group_id)
        for rollout in _take(_free_places(), sandbox=False, now=now):
            if _start_safely(rollout, None):
                started.append(rollout.group_id)
        mark_started(groups=set(started))
    return len(started)


def _choose(slots: dict[Node, int], failed: set[UUID]) -> Node | None:
    """Return the node with most free slots, one where this rollout has not failed if there is one.

    A node whose starts fail at once is always the emptiest: it would swallow every try. So a
    rollout that failed there waits for another node, if there is another with any capacity.
    """
    usable = {node: free for node, free in slots.items() if node.capacity > 0}
    other = {node: free for node, free in usable.items() if node.pk not in failed} or usable
    best = max(other, key=lambda each: other[each], default=None)
    return best if best is not None and slots[best] > 0 else None


def _only(slots: dict[Node, int], node_id: UUID | None) -> dict[Node, int]:
    return {node: free for node, free in slots.items() if node.pk == node_id}


def _nodes_that_failed(taken: list[Rollout]) -> dict[UUID, set[UUID]]:
    """Return the nodes on which each rollout's INIT failed before."""
    found: dict[UUID, set[UUID]] = {}
    again = [rollout.pk for rollout in taken if rollout.restarts]
    failed = Attempt.objects.filter(
        rollout__in=again, stage=Stage.INIT, state=AttemptState.FAILED, node__isnull=False
    )
    for rollout_id, node_id in failed.values_list("rollout_id", "node_id"):
        if node_id is not None:
            found.setdefault(rollout_id, set()).add(node_id)
    return found


def _start_safely(rollout: Rollout, node: Node | None) -> int:
    """Start one rollout; one that cannot be started ends, and does not stop the others."""
    try:
        with transaction.atomic():
            return _start(rollout, node)
    except DatabaseError:
        logger.exception("rollout %s could not be dispatched now; the next round tries", rollout.pk)
        return 0
    except Exception as error:
        logger.exception("rollout %s cannot be dispatched", rollout.pk)
        end_rollout(
            rollout_id=rollout.pk,
            outcome=Outcome.INFRA_FAILED,
            failure_code="dispatch.failed",
            failure_detail=clean_text(f"{type(error).__name__}: {error}")[:4000],
        )
        return 0


def _only_dispatcher() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        row = cursor.fetchone()
    return bool(row and row[0])


def _live_stages() -> dict[UUID, dict[str, int]]:
    """Return the live concurrency by node and stage."""
    found: dict[UUID, dict[str, int]] = {}
    for node, stage, concurrency in Worker.objects.live().values_list(
        "node_id", "stage", "concurrency"
    ):
        stages = found.setdefault(node, {})
        stages[stage] = stages.get(stage, 0) + concurrency
    return found


def _free_slots() -> dict[Node, int]:
    """Return free sandbox slots of the nodes that have live workers for every stage."""
    whole = [node for node, stages in _live_stages().items() if set(stages) == set(Stage.values)]
    nodes = Node.objects.filter(pk__in=whole, draining=False).with_slots_used()
    broken = _failing_nodes()
    return {
        node: max(0, node.capacity - int(getattr(node, "slots_used", 0)))
        for node in nodes
        if node.pk not in broken
    }


def _failing_nodes() -> set[UUID]:
    """Return the nodes whose latest INIT attempts failed one after another a moment ago.

    The breaker closes by itself: once the last failure is old enough, the node is tried again.
    """
    since = timezone.now() - timedelta(seconds=BREAKER_SECONDS)
    recent: dict[UUID, list[str]] = {}
    ended = Attempt.objects.filter(
        stage=Stage.INIT, node__isnull=False, ended_at__gte=since
    ).order_by("-ended_at")
    for node_id, state in ended.values_list("node_id", "state")[:BREAKER_WINDOW]:
        if node_id is not None:
            recent.setdefault(node_id, []).append(state)
    return {
        node_id
        for node_id, states in recent.items()
        if len(states) >= BREAKER_FAILURES
        and set(states[:BREAKER_FAILURES]) == {AttemptState.FAILED}
    }


def _free_places() -> int:
    """Return how many rollouts without a sandbox may start."""
    stages: dict[str, int] = {}
    for per_node in _live_stages().values():
        for stage, concurrency in per_node.items():
            stages[stage] = stages.get(stage, 0) + concurrency
    if set(stages) != set(Stage.values):
        return 0
    busy = Rollout.objects.filter(
        needs_sandbox=False, state__in=[RolloutState.INIT, RolloutState.RUN, RolloutState.EVAL]
    ).count()
    return stages[Stage.RUN] - busy


def _take(
    count: int, *, sandbox: bool, now: datetime, nodes: Sequence[UUID] = ()
) -> Iterable[Rollout]:
    """Lock and return the next queued rollouts in dispatch order; `nodes` have free slots."""
    count = min(count, MAX_PER_ROUND)
    if count <= 0:
        return []
    with connection.cursor() as cursor:
        values: dict[str, Any] = {"sandbox": sandbox, "now": now, "limit": count}
        values["nodes"] = list(nodes)
        cursor.execute(_CANDIDATES, values)
        order = {row[0]: place for place, row in enumerate(cursor.fetchall())}
    locked = (
        Rollout.objects.select_for_update(of=("self",), skip_locked=True)
        .select_related("experiment", "group__snapshot")
        .filter(pk__in=order, state=RolloutState.QUEUED)
        .order_by("pk")
    )
    return sorted(locked, key=lambda rollout: order[rollout.pk])


def _start(rollout: Rollout, node: Node | None) -> int:
    won = Rollout.objects.filter(pk=rollout.pk, state=RolloutState.QUEUED).update(
        state=target(RolloutState.QUEUED, Event.DISPATCH), node=node
    )
    if not won:
        return 0
    if node is not None:
        reserve_sandbox(owner=rollout.pk, node=node, purpose=SandboxPurpose.RUN)
    open_attempt(rollout=rollout, stage=Stage.INIT, node=node)
    return 1
