"""How often an experiment's policy solved each task of its feed."""

from typing import Any

from django.db import connection

from rollouts.models import Experiment, Group
from rollouts.selection_options import accuracy_of
from rollouts.states import Feed, Outcome, RolloutState

# One row per experiment and task. A reward that is null or missing is no sample.
_NOTE = """
WITH value AS (
    SELECT CASE
        WHEN %(key)s = 'reward' THEN reward
        WHEN jsonb_typeof(rewards -> %(key)s) = 'number' THEN (rewards ->> %(key)s)::float
    END AS reached
    FROM rollouts_rollout
    WHERE group_id = %(group)s AND state = %(done)s AND outcome = %(scored)s AND NOT replaced
)
INSERT INTO rollouts_taskprogress
    (experiment_id, task_id, groups, samples, "right", last_epoch, updated_at)
SELECT %(experiment)s, %(task)s, 1, count(reached),
       count(*) FILTER (WHERE reached >= %(threshold)s), %(epoch)s, now()
FROM value
ON CONFLICT (experiment_id, task_id) DO UPDATE SET
    groups = rollouts_taskprogress.groups + 1,
    samples = rollouts_taskprogress.samples + excluded.samples,
    "right" = rollouts_taskprogress."right" + excluded."right",
    last_epoch = greatest(rollouts_taskprogress.last_epoch, excluded.last_epoch),
    updated_at = excluded.updated_at
"""


def note_progress(*, group: Group, experiment: Experiment) -> None:
    """Count a pulled group whose samples are all done, whether it is ready or was filtered.

    Call once, in the transaction that closes it, after its row is locked. What is right is said
    by the experiment's first filter that names a reward, else a reward of 1 or more. Pushed groups
    are passed over.
    """
    if experiment.feed != Feed.PULL or group.epoch is None:
        return
    accuracy = accuracy_of(experiment.filters)
    values: dict[str, Any] = {
        "experiment": experiment.pk,
        "task": group.task_id,
        "group": group.pk,
        "epoch": group.epoch,
        "key": accuracy.key,
        "threshold": accuracy.threshold,
        "done": RolloutState.DONE.value,
        "scored": Outcome.SCORED.value,
    }
    with connection.cursor() as cursor:
        cursor.execute(_NOTE, values)
