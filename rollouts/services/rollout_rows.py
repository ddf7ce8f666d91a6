"""Many rollouts in one statement: rows are made by PostgreSQL, not one by one in Python."""

from collections.abc import Sequence
from typing import Any

from django.db import connection
from django.utils import timezone

from rollouts.models import Experiment, Group, Rollout

# What differs from row to row; every other column gets its field's default.
_PER_ROW = {
    "id": "gen_random_uuid()",
    "group_id": "g.id",
    "experiment_id": "g.experiment_id",
    "environment_id": "g.environment_id",
    "needs_sandbox": "(environment.image_id IS NOT NULL)",
    "sample": "sample.number",
    "priority": "g.priority + %(priority)s",
    "sequence": "g.sequence",
    "queued_at": "%(now)s",
    "created_at": "%(now)s",
}


def insert_rollouts(*, experiment: Experiment, groups: Sequence[Group]) -> int:
    """Insert the rollouts of new groups, numbered from 0 in each; return how many."""
    columns: list[str] = []
    values: list[str] = []
    parameters: dict[str, Any] = {
        "groups": [group.pk for group in groups],
        "priority": experiment.priority,
        "now": timezone.now(),
    }
    for field in Rollout._meta.concrete_fields:
        column = str(field.column)
        columns.append(f'"{column}"')
        if column in _PER_ROW:
            values.append(_PER_ROW[column])
            continue
        parameters[column] = field.get_db_prep_save(field.get_default(), connection)
        values.append(f"%({column})s")
    # Only names of columns and the expressions above are put into the text.
    statement = f"""
        INSERT INTO rollouts_rollout ({", ".join(columns)})
        SELECT {", ".join(values)}
        FROM rollouts_group AS g
        JOIN sandboxes_environment AS environment ON environment.id = g.environment_id
        CROSS JOIN generate_series(0, g.size - 1) AS sample(number)
        WHERE g.id = ANY(%(groups)s)
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return int(cursor.rowcount)
