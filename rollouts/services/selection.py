"""What becomes of a finished group: it is ready for the trainer, or kept from it and said why."""

import logging
from dataclasses import dataclass
from uuid import UUID

from django.db.models import F
from django.db.models.functions import Now

from rollouts.filters.base import FinishedGroup, Sample
from rollouts.filters.registry import TOO_FEW_COMPLETE, TOO_STALE
from rollouts.models import Group, Rollout
from rollouts.selection_options import CANCEL, Selection, stored_filters
from rollouts.services.events import emit
from rollouts.services.feed_returns import return_tasks
from rollouts.services.messages import publish_feed, publish_group_round
from rollouts.services.replacement import replace_sample
from rollouts.services.task_progress import note_progress
from rollouts.states import Feed, GroupState
from rollouts.text import clean_text

logger = logging.getLogger(__name__)

MAX_DETAIL = 1000


@dataclass(frozen=True)
class Verdict:
    """Which rule keeps a group from the trainer, in words why, and whether its task returns."""

    rule: str = ""
    detail: str = ""
    task_returns: bool = False


def count_sample(*, rollout: Rollout) -> None:
    """Count a rollout that has just ended in its group; the last one of an open group settles it.

    Call inside the transaction that ended it, with its row locked; locks the group's row.
    """
    group = lock_group(group_id=rollout.group_id)
    if replace_sample(group=group, rollout=rollout) is not None:
        return
    Group.objects.filter(pk=group.pk).update(done_count=F("done_count") + 1)
    if group.state == GroupState.OPEN and group.done_count + 1 == group.size:
        settle_group(group=group)


def lock_group(*, group_id: UUID) -> Group:
    """Lock a group's row and return it with its experiment, policy and task."""
    return (
        Group.objects.select_for_update(no_key=True, of=("self",))
        .select_related("experiment__policy", "task")
        .get(pk=group_id)
    )


def settle_group(*, group: Group) -> None:
    """Ask the rules of an open group whose samples are all done; with its row locked."""
    finished = finished_group(group)
    oldest, newest = version_span(finished)
    verdict = _verdict(group, finished, oldest)
    values = {"oldest_version": oldest, "newest_version": newest}
    if verdict.rule:
        keep_from_trainer(group=group, verdict=verdict, **values)
    else:
        Group.objects.filter(pk=group.pk, state=GroupState.OPEN).update(
            state=GroupState.READY, ready_at=Now(), filter_detail=verdict.detail, **values
        )
        emit(group.experiment_id, "group.ready", group=group.pk, task=group.task_id)
    experiment = group.experiment
    note_progress(group=group, experiment=experiment)
    if Selection.stored(experiment.selection).unfinished == CANCEL:
        publish_group_round(experiment_id=experiment.pk)


def keep_from_trainer(*, group: Group, verdict: Verdict, **values: int | None) -> None:
    """Write that an open group is filtered, and let its task return where it is not its fault."""
    Group.objects.filter(pk=group.pk, state=GroupState.OPEN).update(
        state=GroupState.FILTERED,
        filter_rule=verdict.rule,
        filter_detail=clean_text(verdict.detail)[:MAX_DETAIL],
        **values,
    )
    if verdict.task_returns:
        return_tasks(groups=[group.pk], reason=verdict.rule)
    if group.experiment.feed == Feed.PULL:
        publish_feed(experiment_id=group.experiment_id)
    emit(
        group.experiment_id,
        "group.filtered",
        group=group.pk,
        task=group.task_id,
        rule=verdict.rule,
        detail=verdict.detail[:MAX_DETAIL],
    )


def finished_group(group: Group) -> FinishedGroup:
    """Return what the rules are given: the group's samples, without those replaced."""
    rows = Rollout.objects.filter(group=group, replaced=False, outcome__isnull=False)
    samples = rows.order_by("sample").values(
        "sample",
        "outcome",
        "stop_reason",
        "reward",
        "rewards",
        "turns",
        "sampled_tokens",
        "trajectory__first_policy_version",
        "trajectory__last_policy_version",
    )
    return FinishedGroup(
        size=group.size,
        samples=tuple(
            Sample(
                number=row["sample"],
                outcome=row["outcome"] or "",
                stop_reason=row["stop_reason"],
                reward=row["reward"],
                rewards=row["rewards"],
                turns=row["turns"],
                sampled_tokens=row["sampled_tokens"],
                oldest_version=row["trajectory__first_policy_version"],
                newest_version=row["trajectory__last_policy_version"],
            )
            for row in samples
        ),
        task_ref=group.task.ref,
        metadata=group.metadata,
    )


def version_span(finished: FinishedGroup) -> tuple[int | None, int | None]:
    """Return the oldest and the newest policy version of what the trainer would train on."""
    complete = finished.complete
    oldest = [each.oldest_version for each in complete if each.oldest_version is not None]
    newest = [each.newest_version for each in complete if each.newest_version is not None]
    return min(oldest, default=None), max(newest, default=None)


def too_few(group: Group, *, complete: int, at_least: int = 0) -> Verdict | None:
    """Return the verdict on a group of which only so many samples were scored, if it is one."""
    experiment = group.experiment
    selection = Selection.stored(experiment.selection)
    needed = max(at_least, selection.complete_needed(size=group.size, feed=experiment.feed))
    if complete >= needed:
        return None
    detail = f"{complete} of {group.size} samples are complete, {needed} are needed"
    return Verdict(TOO_FEW_COMPLETE, detail, task_returns=True)


def stale_detail(*, lag: int, limit: int) -> str:
    """Say how old a group's oldest token is, and how old it might be."""
    return f"its oldest token is {lag} policy versions old, {limit} are allowed"


def _verdict(group: Group, finished: FinishedGroup, oldest: int | None) -> Verdict:
    few = too_few(group, complete=len(finished.complete))
    if few is not None:
        return few
    limit = group.experiment.max_policy_lag
    if limit is not None and oldest is not None:
        lag = group.experiment.policy.version - oldest
        if lag > limit:
            return Verdict(TOO_STALE, stale_detail(lag=lag, limit=limit), task_returns=True)
    rules, faults = stored_filters(group.experiment.filters)
    notes = list(faults)
    for rule in rules:
        try:
            refusal = rule.refuse(finished)
        # A plug-in is foreign code. A rule that fails has refused nothing: the group goes on, as
        # it would without the rule, and carries the fault for who reads it.
        except Exception as error:
            logger.exception("filter %s failed on group %s", rule.name, group.pk)
            notes.append(f"{rule.name} failed: {type(error).__name__}: {error}")
            continue
        if refusal is not None:
            return Verdict(rule.name, str(refusal), task_returns=not rule.judges_task)
    return Verdict(detail=clean_text("; ".join(notes))[:MAX_DETAIL])
