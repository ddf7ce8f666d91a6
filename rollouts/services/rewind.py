"""Rewinding: the trainer restarted from an older checkpoint, and its experiment goes back with it.

What was given out since is open again, as far as it was sampled by that checkpoint or older ones;
what newer weights sampled is of a policy that never was, and its tasks are drawn anew.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, F, Max, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce, Now

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.filters.registry import REWOUND
from rollouts.inference.exceptions import RouterUnavailable
from rollouts.models import (
    Attempt,
    Batch,
    Experiment,
    Group,
    InferenceServer,
    Policy,
    Rollout,
    Trajectory,
)
from rollouts.services.events import emit, emit_each, emit_policy_version
from rollouts.services.feed_returns import return_tasks
from rollouts.services.messages import publish_dispatch, publish_feed, publish_group_round
from rollouts.services.policy_gate import policy_gate
from rollouts.services.server_control import ServerAnswer, versions
from rollouts.states import (
    COMING,
    OPEN_UPDATE,
    AttemptState,
    BatchState,
    ExperimentState,
    GroupState,
    Purpose,
    RolloutState,
    Stage,
)

logger = logging.getLogger(__name__)

# Rollouts of an experiment whose unfinished episode holds tokens of a newer version.
_JOURNALED = """
SELECT DISTINCT entry.rollout_id
FROM rollouts_journalentry AS entry
JOIN rollouts_rollout AS rollout
    ON rollout.id = entry.rollout_id AND rollout.restarts = entry.restarts
WHERE rollout.experiment_id = %(experiment)s AND rollout.state = %(run)s
  AND entry.kind = 'sampled'
  AND (
      (entry.body ->> 'policy_version')::bigint > %(version)s
      OR EXISTS (
          SELECT FROM jsonb_array_elements(entry.body -> 'version_runs') AS run
          WHERE (run ->> 0)::bigint > %(version)s
      )
  )
"""


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What a rewind did; `rollouts_cancelled` end soon."""

    version: int
    batches: int
    groups_ready: int
    groups_filtered: int
    tasks_returned: int
    rollouts_cancelled: int
    servers: Sequence[ServerAnswer] = ()


def rewind(*, experiment_id: UUID, version: int, force: bool = False) -> Rewound:
    """Set the policy back to a version, and open again what the experiment gave out since.

    Rewinding to the present version opens what was given out at it. Doing it again does what is
    left. Asks the servers before, as the end of an update does: they must serve that version.
    Locks the experiment, then the policy. Raises InvalidValue for a newer version, StateConflict
    for an open update, for servers that serve another version, and, unless `force`, for other
    experiments that sample from the policy.
    """
    experiment = Experiment.objects.select_related("policy").get(pk=experiment_id)
    _check(experiment, experiment.policy, version, force)
    said = versions(policy=experiment.policy, expected=version)
    _require_version(said, version)
    with transaction.atomic():
        experiment = Experiment.objects.select_for_update(no_key=True).get(pk=experiment_id)
        assert experiment.policy_id is not None  # only verifications have none
        policy = Policy.objects.select_for_update(no_key=True).get(pk=experiment.policy_id)
        _check(experiment, policy, version, force)
        goes_back = version < policy.version
        Policy.objects.filter(pk=policy.pk).update(
            version=version, weights_epoch=F("weights_epoch") + 1
        )
        Experiment.objects.filter(pk=experiment_id).update(demand_version=None)
        for answer in said:
            InferenceServer.objects.filter(pk=answer.server).update(told_version=answer.version)
        batches, groups_ready, taken_back = _open_batches(experiment, version)
        dropped = _drop_coming(experiment, version, goes_back=goes_back)
        emit_policy_version(policy.pk, version)
        publish_feed(experiment_id=experiment_id)
        publish_dispatch()
    # From here on nothing begins with what was known of the policy before. What began until then
    # is looked for once more.
    _tell_gate(policy.pk)
    with transaction.atomic():
        Experiment.objects.select_for_update(no_key=True).get(pk=experiment_id)
        late = _drop_coming(experiment, version, goes_back=goes_back)
    return Rewound(
        version=version,
        batches=batches,
        groups_ready=groups_ready,
        groups_filtered=taken_back.groups + dropped.groups + late.groups,
        tasks_returned=taken_back.returned + dropped.returned + late.returned,
        rollouts_cancelled=dropped.rollouts + late.rollouts,
        servers=said,
    )


@dataclass(frozen=True)
class _Dropped:
    groups: int = 0
    returned: int = 0
    rollouts: int = 0


def _check(experiment: Experiment, policy: Policy, version: int, force: bool) -> None:
    if experiment.state == ExperimentState.STOPPED:
        raise StateConflict(
            "The experiment was stopped; create a new one.", code="experiment.stopped"
        )
    if experiment.purpose == Purpose.EVALUATION:
        raise StateConflict(
            "Nobody trains on an evaluation: rewind the experiment that is trained."
        )
    if version > policy.version:
        raise InvalidValue(
            f"The policy is at version {policy.version}: a rewind leads back, not to {version}. "
            "Begin an update to go on to a higher version.",
            code="policy.version_not_older",
        )
    update = policy.updates.filter(state__in=OPEN_UPDATE).first()
    if update is not None:
        raise StateConflict(
            f"Update {update.number} to version {update.to_version} is {update.state}: complete "
            "or abandon it first.",
            code="policy.update_open",
        )
    if version == policy.version or force:
        return
    names = _others(experiment, policy)
    if names:
        raise StateConflict(
            f"Other experiments sample from the policy {policy.name} and would go back with it: "
            f"{', '.join(names)}. Stop them, or rewind with `force` and rewind each of them too.",
            code="policy.shared",
        )


def _others(experiment: Experiment, policy: Policy) -> list[str]:
    """Return the names of other experiments that the policy's way back concerns."""
    still_open = Group.objects.filter(experiment=OuterRef("pk"), state=GroupState.OPEN)
    others = (
        policy.experiments.exclude(pk=experiment.pk)
        .exclude(state=ExperimentState.STOPPED)
        .filter(Q(purpose=Purpose.TRAINING) | Exists(still_open))
    )
    return [
        f"{name} ({pk})" for pk, name in others.order_by("created_at").values_list("pk", "name")
    ]


def _require_version(said: Sequence[ServerAnswer], version: int) -> None:
    wrong = [f"{each.url} {each.said}" for each in said if not each.ok]
    if wrong:
        raise StateConflict(
            f"Not every server serves version {version}: {'; '.join(wrong)}. Give them the "
            "checkpoint's weights, or remove them, and rewind again.",
            code="policy.version_mismatch",
        )


def _open_batches(experiment: Experiment, version: int) -> tuple[int, int, _Dropped]:
    """Close what was given out at this version or later, and split its groups."""
    given = Batch.objects.filter(
        experiment=experiment,
        policy_version__gte=version,
        state__in=[BatchState.LEASED, BatchState.ACKNOWLEDGED],
    )
    batches = list(given.select_for_update(no_key=True).order_by("pk"))
    ids = [batch.pk for batch in batches]
    newest = _newest_of(Group.objects.filter(batch__in=ids))
    newer = [pk for pk, found in newest.items() if found is not None and found > version]
    Batch.objects.filter(pk__in=ids).update(
        state=BatchState.REWOUND, closed_at=Coalesce("closed_at", Now())
    )
    dropped = _filter(newer)
    ready = Group.objects.filter(batch__in=ids).update(
        state=GroupState.READY, last_batch=F("batch_id"), batch=None
    )
    _tell_filtered(experiment, newer)
    for batch in batches:
        emit(experiment.pk, "batch.rewound", batch=batch.pk, number=batch.number)
    return len(ids), ready, dropped


def _drop_coming(experiment: Experiment, version: int, *, goes_back: bool) -> _Dropped:
    """Filter the groups on their way that newer weights have sampled, or are sampling now."""
    with connection.cursor() as cursor:
        cursor.execute(
            _JOURNALED,
            {"experiment": experiment.pk, "run": RolloutState.RUN.value, "version": version},
        )
        sampled = [row[0] for row in cursor.fetchall()]
    newer = Q(pk__in=sampled) | Q(trajectory__last_policy_version__gt=version)
    if goes_back:
        running = Attempt.objects.filter(
            rollout=OuterRef("pk"), stage=Stage.RUN, state=AttemptState.RUNNING
        )
        newer |= Q(Exists(running), state=RolloutState.RUN)
    rollouts = Rollout.objects.filter(newer, group=OuterRef("pk"), replaced=False)
    coming = Group.objects.filter(experiment=experiment, state__in=COMING)
    chosen = list(
        coming.filter(Exists(rollouts))
        .select_for_update(no_key=True, of=("self",))
        .order_by("pk")
        .values_list("pk", flat=True)
    )
    dropped = _filter(chosen)
    _tell_filtered(experiment, chosen)
    unfinished = Rollout.objects.unfinished().filter(group__in=chosen).count()
    if unfinished:
        publish_group_round(experiment_id=experiment.pk)
    return _Dropped(dropped.groups, dropped.returned, unfinished)


def _filter(ids: Sequence[UUID]) -> _Dropped:
    """Keep groups from the trainer as rewound, and return their tasks to the feed."""
    groups = Group.objects.filter(pk__in=ids).update(
        state=GroupState.FILTERED,
        filter_rule=REWOUND,
        filter_detail="It was sampled by a newer policy than the one that was gone back to.",
        batch=None,
        last_batch=None,
    )
    return _Dropped(groups, return_tasks(groups=ids, reason=REWOUND))


def _tell_filtered(experiment: Experiment, ids: Sequence[UUID]) -> None:
    told = [{"group": group_id, "rule": REWOUND} for group_id in ids]
    emit_each(experiment.pk, "group.filtered", told)


def _newest_of(groups: QuerySet[Group]) -> dict[UUID, int | None]:
    """Return the newest policy version of each group's tokens; None where none is known."""
    of_group = Trajectory.objects.filter(rollout__group=OuterRef("pk"), rollout__replaced=False)
    newest = of_group.order_by().values("rollout__group").annotate(at=Max("last_policy_version"))
    known = groups.annotate(at=Coalesce("newest_version", Subquery(newest.values("at"))))
    return dict(known.values_list("pk", "at"))


def _tell_gate(policy_id: UUID) -> None:
    """Have the gate know that the weights are others, so that workers read the policy anew."""
    epoch = Policy.objects.values_list("weights_epoch", flat=True).get(pk=policy_id)
    try:
        policy_gate().open(str(policy_id), "rewind", epoch=epoch)
    except RouterUnavailable as fault:
        logger.warning(
            "policy %s was rewound, but %s; workers see it a second late", policy_id, fault
        )
