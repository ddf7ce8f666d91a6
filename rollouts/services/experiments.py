"""Experiments: create, change while in flight, pause and resume."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import F

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.feed_options import FeedSettings
from rollouts.models import Experiment, Policy, Rollout, TaskSet
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.modes import check_carry_over, with_mode
from rollouts.options import Budgets, Sampling
from rollouts.selection_options import CANCEL, CARRY_OVER, Selection, parse_filters
from rollouts.services.broken import refuse_broken_sets
from rollouts.services.events import emit
from rollouts.services.feed_withdraw import withdraw_unstarted
from rollouts.services.messages import publish_dispatch, publish_feed
from rollouts.states import ExperimentState, Feed, LagAction, Purpose, RolloutState

_PARSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sampling": lambda values: Sampling.parse(values).as_dict(),
    "budgets": lambda values: Budgets.parse(values).as_dict(),
    "feed_settings": lambda values: FeedSettings.parse(values).as_dict(),
    "selection": lambda values: Selection.parse(values).as_dict(),
}
MAX_ROLLOUTS_IN_FLIGHT = 200_000
# What an evaluation's results are of does not change while it runs.
_FIXED_IN_EVALUATIONS = {
    *("task_sets", "group_size", "sampling", "budgets", "failure_reward", "feed_settings"),
    *("filters", "selection", "max_policy_lag", "on_policy_lag", "mode"),
}
_NEXT_ROLLOUTS = "rollouts not yet started"
_NEXT_DRAW = "the next draw of the feed"
_FEED_EFFECTS = {
    **dict.fromkeys(("batch_groups", "groups_in_flight", "epochs", "skip"), _NEXT_DRAW),
    "skip_flaky": _NEXT_DRAW,
    **dict.fromkeys(("seed", "shuffle", "weights", "curriculum"), "the next epoch of the feed"),
}
_SELECTION_EFFECTS = {
    **dict.fromkeys(("order", "unfinished"), "the next batch"),
    **dict.fromkeys(("replace_failed", "min_complete_fraction"), "groups not yet finished"),
    "group_deadline_seconds": "groups not yet started",
}
_CALLED = {"allow_broken": "force"}  # what callers call it
_EFFECTS = {
    "group_size": "groups not yet started",
    "filters": "groups not yet finished",
    "task_sets": "sets removed: the next draw of the feed; sets added: its next epoch",
    "max_policy_lag": "at once",
    "on_policy_lag": "at once",
    "mode": "at once",
    "priority": "at once",
    "share": "at once",
    "allow_broken": "groups not yet submitted",
    "name": "at once",
}


def create_experiment(
    *,
    owner: Any,
    name: str,
    policy: Policy | None,
    task_sets: Sequence[TaskSet] = (),
    group_size: int = 8,
    sampling: Mapping[str, Any] | None = None,
    budgets: Mapping[str, Any] | None = None,
    priority: int = 0,
    share: int = 1,
    max_attempts: int = 3,
    failure_reward: float = 0.0,
    on_policy_lag: str = LagAction.CUT,
    purpose: str = Purpose.TRAINING,
    feed: str = Feed.PUSH,
    feed_settings: Mapping[str, Any] | None = None,
    filters: Sequence[Any] = (),
    selection: Mapping[str, Any] | None = None,
    allow_broken: bool = False,
    **bound: Any,
) -> Experiment:
    """Create an experiment; `bound` is `max_policy_lag`, `mode` or neither.

    Only verifications have no policy. Raises InvalidValue, and StateConflict for task sets with a
    broken environment unless `allow_broken`.
    """
    if not 1 <= group_size <= MAX_SAMPLES:
        raise InvalidValue(f"group_size must be between 1 and {MAX_SAMPLES}, not {group_size}.")
    values = with_mode({**bound, "selection": dict(selection or {})})
    lag = values.pop("max_policy_lag", None)
    # The default of the selection is to carry over, which lag 0 forbids.
    unfinished = CANCEL if lag == 0 else CARRY_OVER
    chosen = Selection.parse({"unfinished": unfinished, **values.pop("selection")})
    check_carry_over(max_policy_lag=lag, unfinished=chosen.unfinished)
    if values:
        raise TypeError(f"experiments have no {', '.join(values)}")
    how = FeedSettings.parse(feed_settings or {})
    _check_feed(feed, how, task_sets, group_size)
    if not allow_broken:
        refuse_broken_sets(task_sets=task_sets)
    with transaction.atomic():
        experiment = Experiment.objects.create(
            owner=owner,
            name=name,
            policy=policy,
            group_size=group_size,
            sampling=Sampling.parse(sampling or {}).as_dict(),
            budgets=Budgets.parse(budgets or {}).as_dict(),
            priority=priority,
            share=share,
            max_attempts=max_attempts,
            failure_reward=failure_reward,
            max_policy_lag=lag,
            on_policy_lag=on_policy_lag,
            purpose=purpose,
            feed=feed,
            feed_settings=how.as_dict(),
            filters=parse_filters(filters),
            selection=chosen.as_dict(),
            allow_broken=allow_broken,
        )
        experiment.task_sets.set(task_sets)
        if feed == Feed.PULL:
            publish_feed(experiment_id=experiment.pk)
    return experiment


def update_experiment(*, experiment_id: UUID, **changes: Any) -> Experiment:
    """Change settings while rollouts are under way; `effects_of` says from when on each holds.

    Objects are merged, lists are replaced. Raises InvalidValue, and StateConflict for what an
    evaluation is made of and for task sets with a broken environment.
    """
    with transaction.atomic():
        experiment = Experiment.objects.select_for_update(no_key=True).get(pk=experiment_id)
        if experiment.purpose == Purpose.VERIFICATION:
            raise StateConflict(
                "A verification stays as it is: begin another one.", code="verification.fixed"
            )
        fixed = sorted(_FIXED_IN_EVALUATIONS & set(changes))
        if fixed and experiment.purpose == Purpose.EVALUATION:
            raise StateConflict(
                f"{fixed[0]} of an evaluation stays as it is: begin another one.",
                code="evaluation.fixed",
            )
        changes = with_mode(changes, present_lag=experiment.max_policy_lag)
        task_sets = changes.pop("task_sets", None)
        for name, parse in _PARSED.items():
            if name in changes:
                changes[name] = parse({**getattr(experiment, name), **changes[name]})
        if "filters" in changes:
            changes["filters"] = parse_filters(changes["filters"])
        if "priority" in changes:
            waiting = Rollout.objects.filter(experiment=experiment, state=RolloutState.QUEUED)
            waiting.update(priority=F("priority") + (changes["priority"] - experiment.priority))
        resized = changes.get("group_size", experiment.group_size) != experiment.group_size
        for name, value in changes.items():
            setattr(experiment, name, value)
        if {"selection", "max_policy_lag"} & set(changes):
            unfinished = Selection.stored(experiment.selection).unfinished
            check_carry_over(max_policy_lag=experiment.max_policy_lag, unfinished=unfinished)
        if task_sets is not None or {"feed_settings", "group_size"} & set(changes):
            sets = list(experiment.task_sets.all()) if task_sets is None else task_sets
            how = FeedSettings.stored(experiment.feed_settings)
            _check_feed(experiment.feed, how, sets, experiment.group_size)
        if task_sets is not None and not experiment.allow_broken:
            refuse_broken_sets(task_sets=task_sets)
        if changes:
            experiment.save(update_fields=list(changes))
        if task_sets is not None:
            experiment.task_sets.set(task_sets)
        if experiment.feed == Feed.PULL:
            if resized:
                withdraw_unstarted(experiment=experiment)
            publish_feed(experiment_id=experiment.pk)
    return experiment


def check_settings(
    *,
    feed: str,
    feed_settings: Mapping[str, Any],
    task_sets: Sequence[TaskSet],
    group_size: int,
    max_policy_lag: int | None,
    selection: Mapping[str, Any],
) -> None:
    """Refuse settings that contradict each other. Raises InvalidValue."""
    _check_feed(feed, FeedSettings.parse(feed_settings), task_sets, group_size)
    unfinished = Selection.parse(selection).unfinished
    check_carry_over(max_policy_lag=max_policy_lag, unfinished=unfinished)


def effects_of(changes: Mapping[str, Any]) -> dict[str, str]:
    """Say for each changed setting from what on it holds."""
    effects: dict[str, str] = {}
    for name, value in changes.items():
        inner = {"feed_settings": _FEED_EFFECTS, "selection": _SELECTION_EFFECTS}.get(name)
        if inner is None:
            effects[_CALLED.get(name, name)] = _EFFECTS.get(name, _NEXT_ROLLOUTS)
        else:
            effects |= {f"{name}.{key}": inner[key] for key in value}
    return effects


def set_experiment_state(*, experiment_id: UUID, state: str) -> Experiment:
    """Pause or resume an experiment. Raises StateConflict when it was stopped."""
    with transaction.atomic():
        won = (
            Experiment.objects.filter(pk=experiment_id)
            .exclude(state=ExperimentState.STOPPED)
            .update(state=state)
        )
        if not won:
            raise StateConflict(
                "The experiment was stopped; create a new one.", code="experiment.stopped"
            )
        emit(experiment_id, "experiment.state", state=str(state))
        if state == ExperimentState.ACTIVE:
            publish_dispatch()
            publish_feed(experiment_id=experiment_id)
    return Experiment.objects.get(pk=experiment_id)


def _check_feed(
    feed: str, settings: FeedSettings, task_sets: Sequence[TaskSet], group_size: int
) -> None:
    """Refuse settings that cannot feed, or that name sets which are not the experiment's."""
    if feed == Feed.PULL:
        settings.check_for_pull()
        if not task_sets:
            raise InvalidValue("feed 'pull' draws from task_sets: name at least one.")
        rollouts = settings.target(max_policy_lag=None) * group_size
        if rollouts > MAX_ROLLOUTS_IN_FLIGHT:
            raise InvalidValue(
                f"The feed would keep {rollouts} rollouts in flight, and at most "
                f"{MAX_ROLLOUTS_IN_FLIGHT} are: lower feed_settings.groups_in_flight or group_size."
            )
    unknown = sorted(set(settings.weights) - {each.name for each in task_sets})
    if unknown:
        names = ", ".join(sorted(each.name for each in task_sets)) or "none"
        raise InvalidValue(
            f"feed_settings.weights names {unknown[0]!r}, which is not among the experiment's "
            f"task sets: {names}."
        )
