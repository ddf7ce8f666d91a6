"""A failed sample of a group that lives is sampled anew."""

from django.utils import timezone

from rollouts.models import Group, Rollout
from rollouts.selection_options import Selection
from rollouts.states import ExperimentState, GroupState, Outcome

REPLACEABLE = (Outcome.INFRA_FAILED, Outcome.TIMED_OUT)


def replace_sample(*, group: Group, rollout: Rollout) -> Rollout | None:
    """Queue another sample in the place of one that failed, as the experiment's selection allows.

    Call inside the transaction that ended `rollout`, with the group's row locked. Returns the new
    rollout, or None: then the failed one stays a sample of its group.
    """
    allowed = Selection.stored(group.experiment.selection).replace_failed
    if (
        rollout.outcome not in REPLACEABLE
        or group.state != GroupState.OPEN
        or group.experiment.state == ExperimentState.STOPPED
        or group.replacements >= allowed
        or (group.deadline_at is not None and group.deadline_at <= timezone.now())
    ):
        return None
    group.replacements += 1
    Group.objects.filter(pk=group.pk).update(replacements=group.replacements)
    Rollout.objects.filter(pk=rollout.pk).update(replaced=True)
    return Rollout.objects.create(
        group_id=rollout.group_id,
        experiment_id=rollout.experiment_id,
        environment_id=rollout.environment_id,
        sample=group.size + group.replacements - 1,
        needs_sandbox=rollout.needs_sandbox,
        priority=rollout.priority,
        sequence=rollout.sequence,
        queued_at=timezone.now(),
    )
