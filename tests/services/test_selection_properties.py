"""Whatever happens in whatever order: a group is in one batch at most, none is lost, order holds.

A small model says what should come of each step; after each the rows are compared with it.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Count
from django.db.models.functions import Now
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollouts.exceptions import StateConflict
from rollouts.models import Batch, Group, Policy
from rollouts.services.batches import acknowledge_batch, expire_batches, return_batch
from rollouts.services.cancel import cancel_group, cancel_rollout
from tests import factories
from tests.services.finishing import fail, held, lease, open_group, samples_of, score

pytestmark = pytest.mark.django_db

MAX_LAG = 1
SAMPLES = 2
# In proportion to their numbers: groups that finish well, and batches that come back, are usual.
steps = st.sampled_from(
    [
        *[("add", priority) for priority in (0, 0, 0, 1)],
        *[("finish", number) for number in (0, 0, 0, 0, 1, 1, 2, 5)],
        *[("score", number, reward) for number in (0, 1) for reward in (0.0, 1.0)],
        *[("fail", 0), ("fail", 1), ("drop_sample", 0), ("cancel", 1), ("publish",)],
        *[("lease", count) for count in (1, 1, 1, 2, 2, 2, 3)],
        *[("ack", -1), ("ack", 0), ("nack", -1), ("nack", -2), ("nack", 0)],
        *[("expire", -1), ("expire", -2), ("expire", 1)],
    ]
)


@dataclass
class Known:
    """What the model knows of a group."""

    group: Group
    priority: int
    state: str = "open"
    rewards: list[float] = field(default_factory=list)
    done: int = 0
    replaced: int = 0
    oldest: int | None = None
    batch: int | None = None
    last_batch: int | None = None


class Model:
    """An experiment that filters groups without variance, in the service and as it should be."""

    def __init__(self) -> None:
        self.experiment = factories.make_experiment(
            max_policy_lag=MAX_LAG,
            filters=[{"rule": "no_variance", "key": "reward"}],
            selection={"replace_failed": 1, "min_complete_fraction": 0.5},
        )
        self.task = factories.make_task()
        self.version = 3
        self.groups: list[Known] = []
        self.batches: list[tuple[Batch, str, list[Known]]] = []

    def step(self, name: str, *arguments: Any) -> None:
        """Take a step in both."""
        getattr(self, f"_{name}")(*arguments)

    def _add(self, priority: int) -> None:
        group = open_group(self.experiment, samples=SAMPLES, priority=priority, task=self.task)
        self.groups.append(Known(group, priority))

    def _of(self, number: int, state: str = "open") -> Known | None:
        found = [known for known in self.groups if known.state == state]
        return found[number % len(found)] if found else None

    def _score(self, number: int, reward: float) -> None:
        if known := self._of(number):
            score(samples_of(known.group)[0], reward, version=self.version)
            known.rewards.append(reward)
            known.oldest = self.version if known.oldest is None else known.oldest
            self._count(known)

    def _finish(self, number: int) -> None:
        if known := self._of(number):
            for place in range(SAMPLES - known.done):
                self._score(number, float(place % 2 == 0))

    def _fail(self, number: int) -> None:
        if known := self._of(number):
            fail(samples_of(known.group)[0])
            if known.replaced == 0:
                known.replaced = 1
            else:
                self._count(known)

    def _drop_sample(self, number: int) -> None:
        if known := self._of(number):
            assert cancel_rollout(rollout_id=samples_of(known.group)[0].pk)
            self._count(known)

    def _count(self, known: Known) -> None:
        known.done += 1
        if known.done < SAMPLES:
            return
        stale = known.oldest is not None and self.version - known.oldest > MAX_LAG
        useful = len(known.rewards) == SAMPLES and len(set(known.rewards)) > 1
        known.state = "ready" if useful and not stale else "filtered"

    def _cancel(self, number: int) -> None:
        if known := self._of(number):
            cancel_group(group_id=known.group.pk)
            known.state, known.done = "cancelled", SAMPLES

    def _publish(self) -> None:
        self.version += 1
        Policy.objects.filter(pk=self.experiment.policy_id).update(version=self.version)

    def _lease(self, count: int) -> None:
        for known in self.groups:
            if known.state == "ready" and self.version - (known.oldest or 0) > MAX_LAG:
                known.state, known.last_batch = "filtered", None
        expected, repeats = self._expected(count)

        batch = lease(self.experiment, count)

        assert (batch is None) is (expected is None)
        if batch is None or expected is None:
            return
        number = len(self.batches)
        assert batch.number == number + 1
        assert batch.repeats_id == (None if repeats is None else self.batches[repeats][0].pk)
        assert held(batch) == sorted_ids(expected)
        for known in expected:
            known.state, known.batch, known.last_batch = "leased", number, None
        self.batches.append((batch, "leased", expected))
        event("a batch" if repeats is None else "a batch again")

    def _expected(self, count: int) -> tuple[list[Known] | None, int | None]:
        """Return which groups should leave now, and which batch they repeat."""
        for number, (_batch, state, groups) in enumerate(self.batches):
            whole = all(k.state == "ready" and k.last_batch == number for k in groups)
            if state in ("returned", "expired") and len(groups) == count and whole:
                return groups, number
        coming = [known for known in self.groups if known.state in ("open", "ready")]
        coming.sort(key=lambda known: (-known.priority, known.group.sequence))
        first = coming[:count]
        full = len(first) == count and all(known.state == "ready" for known in first)
        return (first, None) if full else (None, None)

    def _ack(self, number: int) -> None:
        self._close(number, "acknowledged")

    def _nack(self, number: int) -> None:
        self._close(number, "returned")

    def _expire(self, number: int) -> None:
        self._close(number, "expired")

    def _close(self, number: int, state: str) -> None:
        """Close one of all batches, also one that was closed before: then nothing changes."""
        if not self.batches:
            return
        chosen = number % len(self.batches)
        batch, before, groups = self.batches[chosen]
        if state == "expired":
            Batch.objects.filter(pk=batch.pk).update(lease_expires_at=Now() - timedelta(seconds=1))
            assert expire_batches() == (before == "leased")
        else:
            call = acknowledge_batch if state == "acknowledged" else return_batch
            if before in ("leased", state):
                call(batch_id=batch.pk)
            else:
                with pytest.raises(StateConflict):
                    call(batch_id=batch.pk)
        if before != "leased":
            return
        self.batches[chosen] = (batch, state, groups)
        for known in groups:
            if state == "acknowledged":
                known.state = "consumed"
            else:
                known.state, known.batch, known.last_batch = "ready", None, chosen

    def check(self) -> None:
        """Compare the rows with what should be."""
        numbers = {batch.pk: number for number, (batch, _state, _groups) in enumerate(self.batches)}
        rows = Group.objects.filter(experiment=self.experiment).in_bulk()
        assert len(rows) == len(self.groups)
        for known in self.groups:
            row = rows[known.group.pk]
            batch = None if row.batch_id is None else numbers[row.batch_id]
            last = None if row.last_batch_id is None else numbers[row.last_batch_id]
            assert (row.state, row.done_count, row.replacements, batch, last) == (
                *(known.state, known.done, known.replaced, known.batch, known.last_batch),
            )
            assert bool(row.filter_rule) is (row.state == "filtered")
        kept = Batch.objects.filter(experiment=self.experiment).annotate(kept=Count("groups"))
        found = {batch.pk: (batch.state, batch.kept) for batch in kept}
        assert found == {
            batch.pk: (state, len(groups) if state in ("leased", "acknowledged") else 0)
            for batch, state, groups in self.batches
        }


def sorted_ids(groups: list[Known]) -> list[Any]:
    """Return the groups' ids in the order in which a trainer gets them."""
    ordered = sorted(groups, key=lambda known: known.group.sequence)
    return [known.group.pk for known in ordered]


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(steps, min_size=12, max_size=24))
def test_no_sequence_of_events_loses_a_group_or_gives_it_twice(events: list[Any]) -> None:
    with transaction.atomic():
        model = Model()
        for _group in range(5):
            model.step("add", 0)
            model.step("finish", 0)
        for each in events:
            model.step(*each)
            model.check()
        transaction.set_rollback(True)
