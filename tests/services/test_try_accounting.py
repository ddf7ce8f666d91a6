"""Which tries count against a rollout, on which node it is tried again, and when a node rests."""

from datetime import timedelta

import pytest
from django.utils import timezone

from rollouts.models import Attempt, Rollout, Worker
from rollouts.services.dispatch import BREAKER_FAILURES, BREAKER_SECONDS, dispatch
from rollouts.services.finish import fail_attempt, finish_init, give_back
from rollouts.services.reap import reap
from rollouts.services.requeue import retry_rollout
from rollouts.services.workers import Registration
from sandboxes.models import Sandbox
from tests.services.line import (
    bring_to,
    claim_active,
    make_experiment,
    make_group,
    make_node,
    make_worker,
)

pytestmark = pytest.mark.django_db(transaction=True)

Workers = dict[str, Registration]


def only() -> Rollout:
    return Rollout.objects.get()


def start_again() -> None:
    """Dispatch the only rollout now, whatever wait its last failure asked for."""
    Rollout.objects.update(not_before=None)
    assert dispatch() == 1


def fail_init(workers: Workers) -> None:
    claim = claim_active(only(), workers["init"])
    fail_attempt(claim=claim, code="sandbox.start_failed", detail="")


def fate() -> tuple[str, str | None, str]:
    rollout = only()
    return (rollout.state, rollout.outcome, rollout.failure_code)


def expire(worker: Registration) -> None:
    Worker.objects.filter(pk=worker.worker_id).update(
        lease_expires_at=timezone.now() - timedelta(seconds=1)
    )


def test_failed_tries_end_a_rollout_when_they_are_used_up() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=2))

    start_again()
    fail_init(workers)
    assert fate() == ("queued", None, "")

    start_again()
    fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")


def test_attempts_given_back_never_end_a_rollout() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=1))
    claim = bring_to(only(), "run", workers)
    assert claim is not None
    expire(workers["run"])

    give_back(claim=claim)
    assert fate() == ("queued", None, "")

    make_worker("run")
    for _restart in range(3):
        start_again()
        give_back(claim=claim_active(only(), workers["init"]))
        assert fate() == ("queued", None, "")
    start_again()
    fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")


def test_finished_tries_of_a_stage_do_not_count_as_failed_ones() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=3))
    for _round in range(2):
        start_again()
        finish_init(claim=claim_active(only(), workers["init"]))
        claim = claim_active(only(), workers["run"])
        fail_attempt(claim=claim, code="sandbox.gone", detail="", restart_from_init=True)

    for _failure in range(2):
        start_again()
        fail_init(workers)
        assert fate() == ("queued", None, "")
    start_again()
    fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")


def test_attempts_that_no_worker_started_do_not_count() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=1))
    for _round in range(3):
        start_again()
        expire(workers["init"])
        Attempt.objects.filter(state="queued").update(
            published_at=timezone.now() - timedelta(hours=1)
        )
        reap()
        assert fate() == ("queued", None, "")
        workers["init"] = make_worker("init")
    codes = Attempt.objects.values_list("state", "failure_code", "started_at")
    assert list(codes) == [("lost", "node.no_workers", None)] * 3

    start_again()
    fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")


def test_lost_workers_count_and_end_a_rollout_that_kills_them() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=2))

    start_again()
    claim_active(only(), workers["init"])
    expire(workers["init"])
    reap()
    assert fate() == ("queued", None, "")

    workers["init"] = make_worker("init")
    start_again()
    claim_active(only(), workers["init"])
    expire(workers["init"])
    reap()
    assert fate() == ("done", "infra_failed", "init.worker_lost")


def test_an_operators_retry_has_all_its_tries_again() -> None:
    workers = make_node()
    make_group(experiment=make_experiment(max_attempts=2))
    for _failure in range(2):
        start_again()
        fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")

    retry_rollout(rollout_id=only().pk)

    start_again()
    fail_init(workers)
    assert fate() == ("queued", None, "")
    start_again()
    fail_init(workers)
    assert fate() == ("done", "infra_failed", "sandbox.start_failed")
    assert list(Attempt.objects.values_list("number", flat=True)) == [1, 2, 3, 4]


def test_an_operators_retry_has_timings_of_its_own() -> None:
    workers = make_node()
    make_group()
    claim = bring_to(only(), "run", workers)
    assert claim is not None
    Attempt.objects.filter(pk=claim.attempt_id).update(
        started_at=timezone.now() - timedelta(hours=1)
    )
    fail_attempt(claim=claim, code="x", detail="", retryable=False)
    assert only().timings["run"] >= 3600

    retry_rollout(rollout_id=only().pk)
    assert only().timings == {}
    bring_to(only(), "done", workers)

    again = Attempt.objects.get(stage="run", number=2)
    assert again.started_at is not None
    assert again.ended_at is not None
    spent = (again.ended_at - again.started_at).total_seconds()
    assert only().timings["run"] == round(spent, 4)


def test_all_tries_since_the_last_retry_add_up_in_the_timings() -> None:
    workers = make_node()
    make_group()
    start_again()
    claim = claim_active(only(), workers["init"])
    Attempt.objects.filter(pk=claim.attempt_id).update(
        started_at=timezone.now() - timedelta(hours=1)
    )
    fail_attempt(claim=claim, code="sandbox.start_failed", detail="")
    Rollout.objects.update(not_before=None)
    bring_to(only(), "done", workers)

    tries = Attempt.objects.filter(stage="init")
    spent = [(each.ended_at - each.started_at).total_seconds() for each in tries]  # type: ignore[operator]
    assert len(spent) == 2
    assert only().timings["init"] == round(sum(spent), 4)


def test_a_node_on_which_init_always_fails_does_not_swallow_all_tries() -> None:
    make_node("good", capacity=2)
    bad = make_node("bad", capacity=4)
    make_group()

    start_again()
    assert only().node.name == "bad"  # type: ignore[union-attr]
    fail_init(bad)
    Sandbox.objects.filter(state="stopping").update(state="gone", gone_at=timezone.now())
    start_again()

    assert only().node.name == "good"  # type: ignore[union-attr]


def test_a_rollout_that_failed_on_every_node_is_still_tried() -> None:
    nodes = {"one": make_node("one", capacity=4), "two": make_node("two", capacity=8)}
    make_group()
    for name in ("two", "one"):
        start_again()
        assert only().node.name == name  # type: ignore[union-attr]
        fail_init(nodes[name])
    Sandbox.objects.filter(state="stopping").update(state="gone", gone_at=timezone.now())

    start_again()

    assert only().node.name == "two"  # type: ignore[union-attr]


def fail_inits(workers: Workers, count: int) -> None:
    """Start and fail as many rollouts of their own on a node; what they held is removed."""
    group = make_group(samples=count)
    assert dispatch() == count
    for rollout in Rollout.objects.filter(group=group):
        claim = claim_active(rollout, workers["init"])
        fail_attempt(claim=claim, code="sandbox.start_failed", detail="", retryable=False)
    Sandbox.objects.filter(state="stopping").update(state="gone", gone_at=timezone.now())


def test_a_node_whose_inits_fail_one_after_another_rests_and_is_tried_again() -> None:
    workers = make_node("bad", capacity=16)
    fail_inits(workers, BREAKER_FAILURES)
    make_group(samples=2)

    assert dispatch() == 0
    assert Rollout.objects.filter(state="queued").count() == 2

    past = timezone.now() - timedelta(seconds=BREAKER_SECONDS + 1)
    Attempt.objects.filter(state="failed").update(ended_at=past)
    assert dispatch() == 2


def test_other_nodes_go_on_while_one_rests() -> None:
    workers = make_node("bad", capacity=16)
    fail_inits(workers, BREAKER_FAILURES)
    make_node("good", capacity=1)
    make_group(samples=3)

    assert dispatch() == 1

    assert Rollout.objects.get(state="init").node.name == "good"  # type: ignore[union-attr]


def test_fewer_failures_than_the_breaker_asks_for_do_not_stop_a_node() -> None:
    workers = make_node(capacity=16)
    fail_inits(workers, BREAKER_FAILURES - 1)
    make_group()

    assert dispatch() == 1


def test_one_success_among_the_latest_inits_keeps_the_node_in_use() -> None:
    workers = make_node(capacity=16)
    fail_inits(workers, BREAKER_FAILURES - 1)
    group = make_group()
    assert dispatch() == 1
    finish_init(claim=claim_active(Rollout.objects.get(group=group), workers["init"]))
    fail_inits(workers, BREAKER_FAILURES - 1)
    make_group()

    assert dispatch() == 1
