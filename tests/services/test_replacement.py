"""A failed sample of a group that lives is sampled anew; it is in no batch then."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from rollouts.exceptions import StateConflict
from rollouts.models import Experiment, Group, Rollout
from rollouts.services.cancel import cancel_rollout
from rollouts.services.dispatch import dispatch
from rollouts.services.payloads import rollouts_of_batch
from rollouts.services.requeue import retry_rollout
from tests import factories
from tests.services.finishing import (
    fail,
    finish,
    lease,
    now,
    open_group,
    samples_of,
    score,
)
from tests.services.line import make_node

pytestmark = pytest.mark.django_db


def replacing(count: int, **columns: Any) -> Experiment:
    return factories.make_experiment(selection={"replace_failed": count}, **columns)


def samples(group: Group) -> list[tuple[int, str, bool]]:
    rows = group.rollouts.order_by("sample")
    return list(rows.values_list("sample", "state", "replaced"))


@pytest.mark.parametrize("outcome", ["infra_failed", "timed_out"])
def test_another_sample_takes_the_place_of_one_that_failed(outcome: str) -> None:
    group = open_group(replacing(1), priority=7)
    first, second = samples_of(group)

    score(first)
    fail(second, outcome)

    assert (now(group).state, now(group).done_count, now(group).replacements) == ("open", 1, 1)
    assert samples(group) == [(0, "done", False), (1, "done", True), (2, "queued", False)]
    (third,) = samples_of(group)
    assert (third.priority, third.sequence) == (7, group.sequence)
    assert third.needs_sandbox is second.needs_sandbox

    score(third, 0.5)
    assert (now(group).state, now(group).done_count) == ("ready", 2)


def test_what_was_replaced_is_in_no_batch() -> None:
    experiment = replacing(1)
    group = open_group(experiment)
    fail(samples_of(group)[0])
    finish(group)

    batch = lease(experiment, 1)

    assert batch is not None
    assert list(rollouts_of_batch(batch.pk).values_list("sample", flat=True)) == [1, 2]


def test_no_more_are_replaced_than_the_experiment_allows() -> None:
    group = open_group(replacing(2))

    for _round in range(3):
        fail(samples_of(group)[0])

    assert now(group).replacements == 2
    assert samples(group) == [
        *((0, "done", True), (1, "done", True)),
        *((2, "done", False), (3, "queued", False)),
    ]
    fail(samples_of(group)[0])
    assert (now(group).state, now(group).done_count) == ("ready", 2)


def test_without_the_setting_none_is_replaced() -> None:
    group = open_group(factories.make_experiment())

    for sample in samples_of(group):
        fail(sample)

    assert (now(group).state, group.rollouts.count()) == ("ready", 2)


def test_a_sample_that_was_cancelled_or_scored_is_not_replaced() -> None:
    group = open_group(replacing(5))
    first, second = samples_of(group)

    assert cancel_rollout(rollout_id=first.pk)
    score(second)

    assert (now(group).replacements, group.rollouts.count()) == (0, 2)


@pytest.mark.parametrize("why", ["cancelled", "filtered", "stopped", "deadline"])
def test_a_group_that_does_not_live_gets_no_new_samples(why: str) -> None:
    group = open_group(replacing(5))
    (first, *_rest) = samples_of(group)
    if why == "stopped":
        Experiment.objects.update(state="stopped")
    elif why == "deadline":
        Group.objects.update(deadline_at=timezone.now() - timedelta(seconds=1))
    else:
        Group.objects.update(state=why)

    fail(first)

    assert (now(group).replacements, group.rollouts.count()) == (0, 2)
    assert now(group).done_count == 1


def test_a_replacement_is_started_like_any_other_rollout() -> None:
    make_node("here")
    group = open_group(replacing(1), samples=1)
    fail(samples_of(group)[0])

    assert dispatch() == 1

    assert Rollout.objects.get(sample=1).state == "init"


def test_what_was_replaced_is_not_tried_again_itself() -> None:
    group = open_group(replacing(1))
    failed = samples_of(group)[0]
    fail(failed)

    with pytest.raises(StateConflict) as refused:
        retry_rollout(rollout_id=failed.pk)

    assert refused.value.code == "rollout.replaced"
    assert now(group).done_count == 0
