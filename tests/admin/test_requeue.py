"""Trying a rollout again: once, whole, and only while no trainer has its group."""

import threading
import uuid
from functools import partial

import pytest
from django.db import connection
from django.utils import timezone

from rollouts.exceptions import NotThere, StateConflict
from rollouts.models import Attempt, Group, Rollout, Trajectory
from rollouts.services.batches import lease_batch
from rollouts.services.cancel import stop_experiment
from rollouts.services.dispatch import dispatch
from rollouts.services.requeue import retry_rollout
from tests.admin.factories import (
    end,
    make_attempt,
    make_group,
    make_node,
    make_rollout,
    make_sandbox,
    make_trajectory,
    make_worker,
)


@pytest.mark.django_db
@pytest.mark.parametrize("outcome", ["infra_failed", "timed_out", "cancelled"])
def test_a_rollout_without_a_score_starts_over(outcome) -> None:
    rollout = make_rollout(
        turns=3,
        sampled_tokens=40,
        tool_calls=2,
        answer="x",
        last_message="y",
        stop_reason="finished",
        cancel_requested_at=timezone.now(),
        restarts=1,
    )
    attempt = make_attempt(rollout=rollout)
    make_trajectory(rollout=rollout)
    end(rollout, outcome, failure_code="eval.overdue", failure_detail="late")
    assert Group.objects.get(pk=rollout.group_id).state == "ready"

    retry_rollout(rollout_id=rollout.pk)

    after = Rollout.objects.get(pk=rollout.pk)
    assert (after.state, after.outcome, after.done_at, after.reward) == ("queued", None, None, None)
    assert (after.stop_reason, after.failure_code, after.failure_detail) == (None, "", "")
    assert (after.turns, after.sampled_tokens, after.tool_calls) == (0, 0, 0)
    assert (after.answer, after.last_message, after.timings, after.rewards) == (None, "", {}, {})
    assert (after.cancel_requested_at, after.not_before, after.node) == (None, None, None)
    assert after.restarts == 2
    group = Group.objects.get(pk=rollout.group_id)
    assert (group.state, group.done_count, group.ready_at) == ("open", 0, None)
    assert not Trajectory.objects.filter(rollout=rollout).exists()
    assert Attempt.objects.filter(pk=attempt.pk).exists()


@pytest.mark.django_db
def test_a_rollout_that_was_tried_again_can_end_and_its_group_leave() -> None:
    rollout = make_rollout()
    end(rollout, "infra_failed")
    retry_rollout(rollout_id=rollout.pk)

    end(rollout, "scored", reward=1.0)

    experiment = rollout.experiment
    batch = lease_batch(experiment=experiment, owner=experiment.owner, groups=1)
    assert batch is not None
    assert list(batch.groups.values_list("pk", flat=True)) == [rollout.group_id]


@pytest.mark.django_db
def test_a_new_start_is_given_while_the_old_sandbox_is_still_being_removed() -> None:
    rollout = end(make_rollout(), "infra_failed")
    old = make_sandbox(owner=rollout.pk, state="stopping")
    node = make_node()
    for stage in ("init", "run", "eval"):
        make_worker(stage=stage, node=node)
    retry_rollout(rollout_id=rollout.pk)

    assert dispatch() == 1

    rollout.refresh_from_db()
    assert (rollout.state, rollout.node) == ("init", node)
    old.refresh_from_db()
    assert old.state == "stopping"


def refused(rollout: Rollout) -> str:
    before = Rollout.objects.values().get(pk=rollout.pk)
    group = Group.objects.values().get(pk=rollout.group_id)
    with pytest.raises(StateConflict) as error:
        retry_rollout(rollout_id=rollout.pk)
    assert Rollout.objects.values().get(pk=rollout.pk) == before
    assert Group.objects.values().get(pk=rollout.group_id) == group
    return error.value.code


@pytest.mark.django_db
def test_what_cannot_be_tried_again_is_refused_and_unchanged() -> None:
    waiting = make_rollout()
    scored = end(make_rollout(), "scored")
    leased = end(make_rollout(), "infra_failed")
    assert lease_batch(experiment=leased.experiment, owner=leased.experiment.owner, groups=1)
    in_cancelled = end(make_rollout(), "cancelled")
    Group.objects.filter(pk=in_cancelled.group_id).update(state="cancelled")
    stopped = end(make_rollout(), "timed_out")
    stop_experiment(experiment_id=stopped.experiment_id)

    assert refused(waiting) == "rollout.not_done"
    assert refused(scored) == "rollout.scored"
    assert refused(leased) == "group.leased"
    assert refused(in_cancelled) == "group.cancelled"
    assert refused(stopped) == "experiment.stopped"
    with pytest.raises(NotThere):
        retry_rollout(rollout_id=uuid.uuid4())


def together(*calls) -> list[object]:
    """Carry out calls in threads that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[object] = [None] * len(calls)

    def one(place, call) -> None:
        try:
            barrier.wait(timeout=20)
            results[place] = call()
        except Exception as error:
            results[place] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.django_db(transaction=True)
def test_two_retries_at_once_count_once() -> None:
    group = make_group(samples=2)
    first, second = group.rollouts.order_by("sample")
    end(first, "infra_failed")
    end(second, "infra_failed")

    for _round in range(5):
        results = together(*[lambda: retry_rollout(rollout_id=first.pk)] * 4)

        assert results.count(None) == 1
        assert sum(isinstance(result, StateConflict) for result in results) == 3
        group.refresh_from_db()
        assert (group.state, group.done_count) == ("open", 1)
        end(first, "infra_failed")


@pytest.mark.django_db(transaction=True)
def test_a_retry_and_a_lease_at_once_never_both_win() -> None:
    for _round in range(10):
        rollout = make_rollout()
        end(rollout, "infra_failed")
        owner = rollout.experiment.owner

        retried, batch = together(
            partial(retry_rollout, rollout_id=rollout.pk),
            partial(lease_batch, experiment=rollout.experiment, owner=owner, groups=1),
        )

        group = Group.objects.get(pk=rollout.group_id)
        rollout.refresh_from_db()
        if retried is None:
            assert (batch, group.state, rollout.state) == (None, "open", "queued")
        else:
            assert isinstance(retried, StateConflict)
            assert (group.state, rollout.state) == ("leased", "done")
            assert batch.pk == group.batch_id


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("first", ["retry", "lease"])
def test_a_retry_and_a_lease_in_both_orders(first) -> None:
    rollout = make_rollout()
    end(rollout, "infra_failed")
    owner = rollout.experiment.owner
    if first == "retry":
        retry_rollout(rollout_id=rollout.pk)
        assert lease_batch(experiment=rollout.experiment, owner=owner, groups=1) is None
    else:
        assert lease_batch(experiment=rollout.experiment, owner=owner, groups=1) is not None
        with pytest.raises(StateConflict, match="Its group is leased; submit the task again"):
            retry_rollout(rollout_id=rollout.pk)


@pytest.mark.django_db(transaction=True)
def test_a_retry_and_a_stop_at_once_leave_nothing_that_waits_for_ever() -> None:
    for _round in range(10):
        rollout = make_rollout()
        end(rollout, "infra_failed")

        retried, stopped = together(
            partial(retry_rollout, rollout_id=rollout.pk),
            partial(stop_experiment, experiment_id=rollout.experiment_id),
        )

        rollout.refresh_from_db()
        assert retried is None or isinstance(retried, StateConflict)
        assert isinstance(stopped, int)
        assert rollout.state == "done"
        assert rollout.outcome == ("cancelled" if retried is None else "infra_failed")
