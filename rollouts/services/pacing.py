"""Pacing: how many groups may start, so that none is too old when the trainer gets it.

Batches leave in start order, and each is expected to raise the policy's version once. A group that
starts now is leased after the groups in front of it: its lag will be the version raised by the
batches in front. What a trainer is given without its having raised the version is seen too: it
asks for another batch, and that ask is kept as the experiment's demand.
"""

from dataclasses import dataclass
from uuid import UUID

from django.db.models.functions import Now

from rollouts.feed_options import FeedSettings
from rollouts.models import Batch, Experiment, Group, Policy, PolicyUpdate
from rollouts.selection_options import CANCEL, Selection
from rollouts.services.batch_choice import Wish, next_groups
from rollouts.services.messages import publish_feed
from rollouts.states import (
    COMING,
    OPEN_UPDATE,
    BatchState,
    ExperimentState,
    Feed,
    UpdateState,
)

# Of the batches of one version only the sum's rest counts, and that there are any.
BATCHES_LOOKED_AT = 256


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What decides how many groups may start.

    coming: groups open or ready. taken: groups of batches that were leased at the policy's present
    version. asked: a trainer asks for another batch at this version and got none yet. step: by how
    much an update raises the version. update_to: where an open update leads to. cancels: open
    groups are cancelled when a batch is full. batch_ready: one is, and they would be at once.
    """

    version: int
    coming: int
    taken: int = 0
    asked: bool = False
    step: int = 1
    update_to: int | None = None
    cancels: bool = False
    batch_ready: bool = False


def standing_of(*, experiment: Experiment) -> Standing:
    """Return how an experiment stands; call under its lock."""
    assert experiment.policy_id is not None  # only verifications have none
    version = Policy.objects.values_list("version", flat=True).get(pk=experiment.policy_id)
    updates = PolicyUpdate.objects.filter(policy_id=experiment.policy_id)
    to_version = updates.filter(state__in=OPEN_UPDATE).values_list("to_version", flat=True).first()
    last = updates.filter(state=UpdateState.COMPLETED).order_by("-number").first()
    batches = Batch.objects.filter(experiment=experiment).order_by("-number")
    counted = (BatchState.LEASED, BatchState.ACKNOWLEDGED)
    cancels = Selection.stored(experiment.selection).unfinished == CANCEL
    size = FeedSettings.stored(experiment.feed_settings).batch_groups or 1
    return Standing(
        version=version,
        coming=Group.objects.filter(experiment=experiment, state__in=COMING).count(),
        taken=sum(
            count
            for count, of_version, state in batches.values_list(
                "group_count", "policy_version", "state"
            )[:BATCHES_LOOKED_AT]
            if of_version == version and state in counted
        ),
        asked=experiment.demand_version == version,
        step=last.to_version - last.from_version if last is not None else 1,
        update_to=to_version,
        cancels=cancels,
        batch_ready=cancels
        and next_groups(experiment=experiment, wish=Wish(groups=size)) is not None,
    )


def limit_of(*, lag: int | None, settings: FeedSettings, standing: Standing) -> int | None:
    """Return how many groups may be coming at most by the bound on lag; None without one.

    Where open groups are cancelled when the batch is full, more may be open than it takes (to find
    enough that pass the filters): those left over become no older.
    """
    if lag is None:
        return None
    if lag == 0 and standing.update_to is not None:
        return 0
    batch = settings.batch_groups or 1
    in_front = _in_front(standing, batch)
    if standing.cancels and not in_front:
        return max(batch, settings.target(max_policy_lag=lag))
    ahead = lag // max(1, standing.step)
    return max(0, batch * (ahead + 1) - in_front)


def room_for(*, lag: int | None, settings: FeedSettings, standing: Standing) -> int:
    """Return how many groups may start now."""
    if standing.batch_ready:
        return 0
    target = settings.target(max_policy_lag=lag)
    limit = limit_of(lag=lag, settings=settings, standing=standing)
    return max(0, (target if limit is None else min(target, limit)) - standing.coming)


def describe(*, lag: int | None, settings: FeedSettings, standing: Standing) -> str:
    """Say in words what feeding does or waits for, when nothing more may start."""
    target = settings.target(max_policy_lag=lag)
    limit = limit_of(lag=lag, settings=settings, standing=standing)
    if standing.batch_ready:
        return "a batch is ready: what started now would be cancelled when it is leased"
    if limit is None or limit >= target or standing.coming < limit:
        return f"keeps {target} groups in flight"
    if lag == 0 and standing.update_to is not None:
        return (
            f"waits for the end of the policy's update to version {standing.update_to}: "
            "at lag 0 groups start after it"
        )
    batch = settings.batch_groups or 1
    batches = (_in_front(standing, batch) + standing.coming) // batch
    over = batches * standing.step - (lag or 0)
    steps = -(-over // standing.step)
    versions = "version" if over == 1 else "versions"
    return (
        f"waits for policy version {standing.version + steps * standing.step}: "
        f"a group started now would be {over} {versions} too old"
    )


def note_demand(*, experiment_id: UUID, version: int) -> None:
    """Note that a trainer asks for a batch at this version of the policy and there is none.

    Call where a lease finds too few groups, in its transaction. Idempotent.
    """
    changed = (
        Experiment.objects.filter(pk=experiment_id, feed=Feed.PULL)
        .exclude(demand_version=version)
        .update(demand_version=version, demand_at=Now())
    )
    if changed:
        publish_feed(experiment_id=experiment_id)


def meet_demand(*, experiment_id: UUID) -> None:
    """Note that the trainer got what it asked for. Call where a batch is leased."""
    Experiment.objects.filter(pk=experiment_id, demand_version__isnull=False).update(
        demand_version=None
    )


def publish_feeds(*, policy_id: UUID) -> None:
    """Ask for the pulling experiments of a policy to be fed: its version may be another."""
    pulling = Experiment.objects.filter(
        policy_id=policy_id, feed=Feed.PULL, state=ExperimentState.ACTIVE
    )
    for experiment_id in pulling.order_by().values_list("pk", flat=True):
        publish_feed(experiment_id=experiment_id)


def _in_front(standing: Standing, batch: int) -> int:
    """Return how many groups of the present version's batch are given out already.

    A batch may be leased in parts, by the ranks of one trainer: while they ask, the rest of it is
    expected at this version. Once nobody asks, the next batch is expected after the next update.
    """
    if standing.taken == 0:
        return 0
    return standing.taken % batch if standing.asked else batch
