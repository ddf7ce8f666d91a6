"""The dispatcher: it decides order, and publishes only what free slots can start."""

from collections.abc import Iterable
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone

from rollouts.models import Rollout, Worker
from rollouts.services.attempts import open_attempt
from rollouts.states import Event, RolloutState, Stage, target
from sandboxes.models import Node
from sandboxes.services.lifecycle import reserve_sandbox
from sandboxes.states import SandboxPurpose

LOCK_KEY = 7_201_001
MAX_PER_ROUND = 500

# Per active experiment the first queued rollouts by index, then all of them by priority and by
# (what the experiment has running + its place in line) / share: weighted fair sharing.
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
    ORDER BY priority DESC, sequence, sample
    LIMIT %(limit)s
) AS line
WHERE experiment.state = 'active'
ORDER BY line.priority DESC, (load.running + line.place)::float / experiment.share,
         line.sequence, line.sample
LIMIT %(limit)s
"""


def dispatch() -> int:
    """Start as many queued rollouts as there are free slots; return how many.

    Holds a transaction-level advisory lock: a second dispatcher at the same time does nothing.
    """
    now = timezone.now()
    started = 0
    with transaction.atomic():
        if not _only_dispatcher():
            return 0
        slots = _free_slots(now)
        for rollout in _take(sum(slots.values()), sandbox=True, now=now):
            node = max(slots, key=lambda each: slots[each])
            if slots[node] <= 0:
                break
            slots[node] -= 1
            started += _start(rollout, node)
        for rollout in _take(_free_places(now), sandbox=False, now=now):
            started += _start(rollout, None)
    return started


def _only_dispatcher() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        row = cursor.fetchone()
    return bool(row and row[0])


def _live_stages(now: datetime) -> dict[UUID, dict[str, int]]:
    """Return the live concurrency by node and stage."""
    found: dict[UUID, dict[str, int]] = {}
    for node, stage, concurrency in Worker.objects.live(now).values_list(
        "node_id", "stage", "concurrency"
    ):
        stages = found.setdefault(node, {})
        stages[stage] = stages.get(stage, 0) + concurrency
    return found


def _free_slots(now: datetime) -> dict[Node, int]:
    """Return free sandbox slots of the nodes that have live workers for every stage."""
    whole = [node for node, stages in _live_stages(now).items() if set(stages) == set(Stage.values)]
    nodes = Node.objects.filter(pk__in=whole, draining=False).with_slots_used()
    free = {node: node.capacity - int(getattr(node, "slots_used", 0)) for node in nodes}
    return {node: count for node, count in free.items() if count > 0}


def _free_places(now: datetime) -> int:
    """Return how many rollouts without a sandbox may start."""
    stages: dict[str, int] = {}
    for per_node in _live_stages(now).values():
        for stage, concurrency in per_node.items():
            stages[stage] = stages.get(stage, 0) + concurrency
    if set(stages) != set(Stage.values):
        return 0
    busy = Rollout.objects.filter(
        needs_sandbox=False, state__in=[RolloutState.INIT, RolloutState.RUN, RolloutState.EVAL]
    ).count()
    return stages[Stage.RUN] - busy


def _take(count: int, *, sandbox: bool, now: datetime) -> Iterable[Rollout]:
    """Lock and return the next queued rollouts in dispatch order."""
    count = min(count, MAX_PER_ROUND)
    if count <= 0:
        return []
    with connection.cursor() as cursor:
        cursor.execute(_CANDIDATES, {"sandbox": sandbox, "now": now, "limit": count})
        order = {row[0]: place for place, row in enumerate(cursor.fetchall())}
    locked = (
        Rollout.objects.select_for_update(of=("self",), skip_locked=True)
        .select_related("experiment")
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
