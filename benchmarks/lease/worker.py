"""One database with so many consumed groups: times a trainer's calls when told to, by a line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import django

PER_BATCH = 32
READY_BEHIND = 32

_FILL = """
INSERT INTO rollouts_batch
    (id, experiment_id, owner_id, number, state, group_count, policy_version, lease_expires_at,
     created_at, closed_at)
SELECT gen_random_uuid(), %(experiment)s, %(owner)s, number, 'acknowledged', %(size)s, 0, now(),
       now(), now()
FROM generate_series(1, greatest(1, %(groups)s / %(size)s)) AS number;

INSERT INTO rollouts_group
    (id, experiment_id, task_id, environment_id, state, size, done_count, priority, metadata,
     batch_id, created_at, started_at, ready_at, oldest_version, newest_version)
SELECT gen_random_uuid(), %(experiment)s, %(task)s, %(environment)s, 'consumed', 8, 8, 0, '{}',
       batch.id, now(), now(), now(), 0, 0
FROM generate_series(0, %(groups)s - 1) AS place
JOIN rollouts_batch AS batch ON batch.experiment_id = %(experiment)s
 AND batch.number = least(place / %(size)s + 1, greatest(1, %(groups)s / %(size)s));
"""
_ARRIVE = """
INSERT INTO rollouts_group
    (id, experiment_id, task_id, environment_id, state, size, done_count, priority, metadata,
     created_at, started_at, ready_at, oldest_version, newest_version)
SELECT gen_random_uuid(), %(experiment)s, %(task)s, %(environment)s, %(state)s, 8,
       CASE WHEN %(state)s = 'ready' THEN 8 ELSE 0 END, 0, '{}', now(), now(), now(), 0, 0
FROM generate_series(1, %(count)s)
"""


class Trainer:
    """An experiment with its past, and the calls of its trainer."""

    def __init__(self, groups: int) -> None:
        from django.contrib.auth import get_user_model
        from django.db import connection

        from rollouts.models import Experiment, Policy, Task, TaskSet
        from sandboxes.models import Environment

        owner = get_user_model().objects.create(username="trainer")
        environment = Environment.objects.create(name="plain", version=1, evaluator="exact")
        task = Task.objects.create(
            task_set=TaskSet.objects.create(name="tasks"),
            ref="task",
            environment=environment,
            instruction="Say hello.",
            content_hash="0" * 64,
        )
        policy = Policy.objects.create(name="policy", model="m", tokenizer="/nowhere")
        self.experiment = Experiment.objects.create(
            owner=owner,
            name="much done",
            policy=policy,
            max_policy_lag=4,
            feed="pull",
            feed_settings={"batch_groups": PER_BATCH},
        )
        self.values: dict[str, Any] = {
            "experiment": self.experiment.pk,
            "owner": owner.pk,
            "task": task.pk,
            "environment": environment.pk,
            "groups": groups,
            "size": PER_BATCH,
        }
        with connection.cursor() as cursor:
            # The rows are consistent by construction; checking each of them takes minutes.
            cursor.execute("SET session_replication_role = replica")
            cursor.execute(_FILL, self.values)
            cursor.execute("SET session_replication_role = DEFAULT")
            cursor.execute("VACUUM ANALYZE")

    def arrive(self, count: int, state: str) -> None:
        """Let groups appear in a state."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(_ARRIVE, {**self.values, "count": count, "state": state})

    def round(self) -> dict[str, float]:
        """Time each call once, in seconds; what a batch takes away arrives again before."""
        from rollouts.models import Experiment
        from rollouts.services.batch_choice import Wish, worth_trying
        from rollouts.services.batches import acknowledge_batch, lease_batch
        from rollouts.services.pacing import standing_of

        self.arrive(PER_BATCH, "ready")
        experiment = Experiment.objects.get(pk=self.experiment.pk)
        times: dict[str, float] = {}
        leased: list[UUID] = []

        def lease() -> None:
            batch = lease_batch(experiment=experiment, owner=experiment.owner, groups=PER_BATCH)
            assert batch is not None
            leased.append(batch.pk)

        wish = Wish(groups=PER_BATCH)
        times["feed count"] = timed(lambda: standing_of(experiment=experiment))
        times["a look while waiting"] = timed(
            lambda: worth_trying(experiment_id=experiment.pk, wish=wish)
        )
        times["lease"] = timed(lease)
        times["acknowledge"] = timed(lambda: acknowledge_batch(batch_id=leased[0]))
        return times


def timed(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> int:
    """Fill the database, then time one round for each line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, required=True)
    options = parser.parse_args()
    os.environ["DJANGO_SETTINGS_MODULE"] = "prorl_site.settings.base"
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    trainer = Trainer(options.groups)
    trainer.arrive(READY_BEHIND, "ready")
    print(json.dumps({}), flush=True)
    for _line in sys.stdin:
        print(json.dumps(trainer.round()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
