"""Which groups make the next batch: start order or first finished, none too stale, repeats first.

Everything here reads only groups that are on their way (open or ready), by an index of them alone:
what was consumed costs nothing, however much it is.
"""

from dataclasses import dataclass
from uuid import UUID

from django.db.models import Count, ExpressionWrapper, F, FloatField, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from rollouts.feed_options import FeedSettings
from rollouts.models import Batch, Experiment, Group, Rollout
from rollouts.querysets import GroupQuerySet
from rollouts.selection_options import FINISHED, Selection
from rollouts.states import Feed, GroupState

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a trainer asks for: how many groups, how old at most, how complete at least."""

    groups: int
    max_policy_lag: int | None = None
    min_complete_fraction: float | None = None

    def lag_limit(self, experiment: Experiment) -> int | None:
        """Return the smaller of the experiment's limit and its own; None: any lag."""
        limits = [experiment.max_policy_lag, self.max_policy_lag]
        return min((limit for limit in limits if limit is not None), default=None)


def too_stale(*, experiment: Experiment, version: int, limit: int | None) -> GroupQuerySet:
    """Return the ready groups whose oldest token is more than `limit` versions old."""
    ready = Group.objects.filter(experiment=experiment, state=GroupState.READY)
    if limit is None:
        return ready.none()
    return ready.filter(oldest_version__lt=version - limit)


def given_back(*, experiment: Experiment, wish: Wish) -> tuple[Batch, list[UUID]] | None:
    """Return the oldest batch of this size that came back and is still whole, with its groups."""
    ready = Group.objects.filter(experiment=experiment, state=GroupState.READY)
    found: dict[UUID, list[UUID]] = {}
    acceptable = _complete_enough(ready.filter(last_batch__isnull=False), wish)
    for pk, last in acceptable.values_list("pk", "last_batch_id"):
        found.setdefault(last, []).append(pk)
    whole = [last for last, groups in found.items() if len(groups) == wish.groups]
    batches = Batch.objects.filter(pk__in=whole, group_count=wish.groups)
    batch = batches.order_by("number").first()
    return None if batch is None else (batch, found[batch.pk])


def next_groups(*, experiment: Experiment, wish: Wish) -> list[UUID] | None:
    """Return the next groups in the experiment's order, or None while they are not all ready.

    In start order an open group in front is waited for; a ready one that is less complete than
    wished for is passed over and stays ready.
    """
    selection = Selection.stored(experiment.selection)
    if selection.order == FINISHED:
        ready = Group.objects.filter(experiment=experiment).leasable()
        line = ready.order_by("ready_at", "sequence")
    else:
        line = Group.objects.filter(experiment=experiment).coming()
    first = list(_complete_enough(line, wish).values_list("pk", "state")[: wish.groups])
    if len(first) < wish.groups or any(state != GroupState.READY for _pk, state in first):
        return None
    return [pk for pk, _state in first]


def worth_trying(*, experiment_id: UUID, wish: Wish) -> bool:
    """Tell whether a lease would give a batch, or would first make room by what is too stale.

    Takes no locks and changes nothing.
    """
    experiment = Experiment.objects.select_related("policy").filter(pk=experiment_id).first()
    if experiment is None:
        return True  # the call itself says so
    limit = wish.lag_limit(experiment)
    stale = too_stale(experiment=experiment, version=experiment.policy.version, limit=limit)
    return (
        stale.exists()
        or given_back(experiment=experiment, wish=wish) is not None
        or next_groups(experiment=experiment, wish=wish) is not None
    )


def most_at_once(experiment: Experiment) -> int | None:
    """Return how many groups a pulling experiment ever has on their way; None: no bound."""
    settings = FeedSettings.stored(experiment.feed_settings)
    if experiment.feed != Feed.PULL or settings.batch_groups is None:
        return None
    lag = experiment.max_policy_lag
    target = settings.target(max_policy_lag=lag)
    return target if lag is None else min(target, settings.batch_groups * (lag + 1))


def _complete_enough(groups: GroupQuerySet, wish: Wish) -> GroupQuerySet:
    """Leave out ready groups of which a smaller part than wished for was scored."""
    if not wish.min_complete_fraction:
        return groups
    scored = Rollout.objects.scored().filter(group=OuterRef("pk"), replaced=False)
    counts = scored.order_by().values("group").annotate(count=Count("pk")).values("count")
    needed = ExpressionWrapper(
        F("size") * wish.min_complete_fraction - _ROUNDING, output_field=FloatField()
    )
    return groups.annotate(complete=Coalesce(Subquery(counts), 0)).filter(
        Q(state=GroupState.OPEN) | Q(complete__gte=needed)
    )
