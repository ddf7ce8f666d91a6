"""Deadlines of groups: stragglers are cancelled, and a group with too few samples is filtered."""

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from rollouts.models import Experiment, FeedReturn, Group, Rollout
from rollouts.services.deadlines import close_overdue_groups, mark_started
from rollouts.services.dispatch import dispatch
from rollouts.services.finish import finish_cancelled
from rollouts.services.reap import reap
from tests import factories
from tests.services.finishing import finish, held, lease, now, open_group, samples_of, score
from tests.services.line import claim_active, make_node

pytestmark = pytest.mark.django_db


def with_deadline(**columns: Any) -> Experiment:
    selection = {"group_deadline_seconds": 60, **columns.pop("selection", {})}
    return factories.make_experiment(selection=selection, **columns)


def overdue(group: Group) -> None:
    Group.objects.filter(pk=group.pk).update(deadline_at=Now() - timedelta(seconds=1))


def test_a_group_starts_once_and_must_be_done_by_its_deadline() -> None:
    timed, free = open_group(with_deadline()), open_group(factories.make_experiment())

    mark_started(groups=[timed.pk, free.pk])
    first = now(timed)
    mark_started(groups=[timed.pk])

    assert first.started_at is not None
    assert first.deadline_at is not None
    assert first.deadline_at - first.started_at == timedelta(seconds=60)
    assert (now(timed).started_at, now(timed).deadline_at) == (first.started_at, first.deadline_at)
    assert now(free).started_at is not None
    assert now(free).deadline_at is None


def test_with_enough_samples_the_rest_is_cancelled_and_the_group_goes_on() -> None:
    experiment = with_deadline(selection={"min_complete_fraction": 0.5})
    group = open_group(experiment, samples=4)
    for reward, sample in zip((1.0, 0.0), samples_of(group), strict=False):
        score(sample, reward)
    overdue(group)

    assert close_overdue_groups() == 1

    assert (now(group).state, now(group).done_count) == ("ready", 4)
    outcomes = group.rollouts.order_by("sample").values_list("outcome", flat=True)
    assert list(outcomes) == ["scored", "scored", "cancelled", "cancelled"]
    assert held(lease(experiment, 1)) == [group.pk]
    assert close_overdue_groups() == 0


def test_with_enough_samples_the_rules_are_asked_all_the_same() -> None:
    rule = {"rule": "no_variance", "key": "reward"}
    experiment = with_deadline(selection={"min_complete_fraction": 0.5}, filters=[rule])
    group = open_group(experiment, samples=4)
    for sample in samples_of(group)[:2]:
        score(sample, 1.0)
    overdue(group)

    close_overdue_groups()

    assert (now(group).state, now(group).filter_rule) == ("filtered", "no_variance")


def test_with_too_few_the_group_is_filtered_and_its_task_returns() -> None:
    experiment = with_deadline(feed="pull", feed_settings={"batch_groups": 1})
    group = open_group(experiment, epoch=0, position=3)
    score(samples_of(group)[0])
    overdue(group)

    assert close_overdue_groups() == 1

    assert (now(group).state, now(group).filter_rule) == ("filtered", "too_few_complete")
    assert now(group).filter_detail == "1 of 2 samples are complete, 2 are needed"
    assert not group.rollouts.unfinished().exists()
    assert FeedReturn.objects.get().position == 3
    assert lease(experiment, 1) is None


def test_a_group_of_which_nothing_is_complete_is_never_given_out_at_its_deadline() -> None:
    group = open_group(with_deadline())
    overdue(group)

    close_overdue_groups()

    assert (now(group).state, now(group).filter_rule) == ("filtered", "too_few_complete")
    assert now(group).filter_detail == "0 of 2 samples are complete, 1 are needed"


def test_a_sample_that_a_worker_holds_is_waited_for_until_it_has_ended() -> None:
    workers = make_node("here")
    experiment = with_deadline(selection={"min_complete_fraction": 0.5})
    group = open_group(experiment)
    score(samples_of(group)[0])
    assert dispatch() == 1
    (straggler,) = samples_of(group)
    claim = claim_active(straggler, workers["init"])
    overdue(group)

    assert close_overdue_groups() == 1
    assert now(group).state == "open"
    assert Rollout.objects.get(pk=straggler.pk).cancel_requested_at is not None
    assert close_overdue_groups() == 0  # it was told already
    finish_cancelled(claim=claim)

    assert (now(group).state, now(group).done_count) == ("ready", 2)


def test_the_dispatcher_starts_the_clock_of_a_group() -> None:
    make_node("here")
    group = open_group(with_deadline())

    assert dispatch() == 2

    assert now(group).started_at is not None
    assert now(group).deadline_at is not None


def test_only_open_groups_past_their_deadline_are_closed() -> None:
    experiment = with_deadline()
    early, done, late = (open_group(experiment) for _each in range(3))
    finish(done)
    overdue(done)
    overdue(late)
    Group.objects.filter(pk=early.pk).update(deadline_at=Now() + timedelta(hours=1))

    assert reap().overdue_groups == 1

    assert [now(group).state for group in (early, done, late)] == ["open", "ready", "filtered"]
