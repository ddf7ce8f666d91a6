"""Importing records: what of a task is kept where."""

from dataclasses import replace

import pytest

from rollouts.importers.base import TaskRecord
from rollouts.models import Task
from rollouts.services.tasksets import import_tasks
from tests.services.line import make_environment

pytestmark = pytest.mark.django_db

PLAIN = TaskRecord(ref="a", instruction="Go on.", evaluator="exact")
GIVEN = replace(PLAIN, messages=({"role": "user", "content": "Look."},))


def test_the_conversation_of_a_task_is_kept_and_a_new_one_is_a_change() -> None:
    environment = make_environment(sandbox=False)
    reports = [
        import_tasks(name="set", records=[record], environment_of=lambda _record: environment)
        for record in (PLAIN, GIVEN, GIVEN)
    ]

    assert [(r.created, r.changed, r.unchanged) for r in reports] == [
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
    ]
    assert Task.objects.get().payload["messages"] == [{"role": "user", "content": "Look."}]


def test_a_task_without_one_has_none() -> None:
    environment = make_environment(sandbox=False)
    import_tasks(name="set", records=[PLAIN], environment_of=lambda _record: environment)

    assert "messages" not in Task.objects.get().payload
