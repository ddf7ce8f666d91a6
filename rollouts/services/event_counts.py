"""Counts as events: how much is under way, told when it has changed.

They also put right what a listener makes of events that were lost on their way.
"""

import json
import logging
import threading
import time
from collections import defaultdict
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import Count
from redis.exceptions import RedisError

from rollouts.models import Experiment, Group, Rollout
from rollouts.services.events import EventKind, emit, event_store
from rollouts.states import ExperimentState, GroupState, RolloutState

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
EXPERIMENTS_AT_ONCE = 200
UNDER_WAY = (RolloutState.QUEUED, RolloutState.INIT, RolloutState.RUN, RolloutState.EVAL)
HELD = (GroupState.OPEN, GroupState.READY, GroupState.LEASED)

_lock = threading.Lock()
_told_at = float("-inf")


def tell_counts_soon() -> None:
    """Tell the counts that changed, unless this process did so a moment ago."""
    global _told_at
    with _lock:
        if time.monotonic() - _told_at < PAUSE_SECONDS:
            return
        _told_at = time.monotonic()
    tell_counts()


def tell_counts() -> int:
    """Emit the counts of each experiment in which they changed; return how many. Two queries."""
    counts = counts_of_active()
    key = f"prorl:{settings.DEPLOYMENT}:counts"
    try:
        told: dict[str, str] = event_store().hgetall(key)
        now = {name: json.dumps(each, sort_keys=True) for name, each in counts.items()}
        changed = {name: text for name, text in now.items() if told.get(name) != text}
        if changed:
            event_store().hset(key, mapping=changed)
        if gone := told.keys() - now.keys():
            event_store().hdel(key, *gone)
    except RedisError as fault:
        logger.debug("counts cannot be told: %s", fault)
        return 0
    for name in changed:
        emit(UUID(name), EventKind.COUNTS, **counts[name])
    return len(changed)


def counts_of_active() -> dict[str, dict[str, Any]]:
    """Return, by id as text, what is under way in active experiments: rollouts and groups."""
    active = Experiment.objects.filter(state=ExperimentState.ACTIVE).order_by("-created_at")
    ids = list(active.values_list("pk", flat=True)[:EXPERIMENTS_AT_ONCE])
    found: dict[Any, dict[str, dict[str, int]]] = defaultdict(
        lambda: {"rollouts": dict.fromkeys(UNDER_WAY, 0), "groups": dict.fromkeys(HELD, 0)}
    )
    for model, states, name in ((Rollout, UNDER_WAY, "rollouts"), (Group, HELD, "groups")):
        rows = model._default_manager.filter(experiment_id__in=ids, state__in=states).order_by()
        for each, state, count in rows.values_list("experiment_id", "state").annotate(
            count=Count("pk")
        ):
            found[each][name][state] = count
    return {str(each): found[each] for each in ids}
