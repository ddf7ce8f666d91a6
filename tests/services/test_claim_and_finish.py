"""Claiming, finishing and losing, against real concurrency."""

import pytest

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, Evaluation, Group, Rollout
from rollouts.services.cancel import cancel_rollout
from rollouts.services.claim import Claim, claim_attempt
from rollouts.services.finish import (
    fail_attempt,
    finish_cancelled,
    finish_eval,
    finish_init,
    finish_run,
    give_back,
)
from rollouts.services.reap import recover_attempts_of
from sandboxes.models import Sandbox
from tests.services.line import (
    active_attempt,
    bring_to,
    claim_active,
    eval_result,
    make_group,
    make_node,
    run_result,
)
from tests.services.race import together, while_open

pytestmark = pytest.mark.django_db(transaction=True)


def only_rollout() -> Rollout:
    return Rollout.objects.get()


def test_a_rollout_goes_through_the_line_and_its_group_becomes_ready() -> None:
    workers = make_node()
    group = make_group()

    assert bring_to(only_rollout(), "done", workers) is None

    rollout = only_rollout()
    assert (rollout.state, rollout.outcome, rollout.reward) == ("done", "scored", 1.0)
    assert (rollout.stop_reason, rollout.answer, rollout.turns) == ("finished", "42", 2)
    assert set(rollout.timings) == {
        *("init", "run", "eval", "queue_init", "queue_run", "queue_eval", "inference", "tools")
    }
    assert list(Attempt.objects.values_list("stage", "number", "state")) == [
        ("init", 1, "finished"),
        ("run", 1, "finished"),
        ("eval", 1, "finished"),
    ]
    group.refresh_from_db()
    assert (group.state, group.done_count) == ("ready", 1)
    assert Evaluation.objects.count() == 1


def test_two_workers_with_the_same_message_claim_once() -> None:
    workers = make_node()
    make_group()
    bring_to(only_rollout(), "init", workers)
    fail_attempt(claim=_running_claim(), code="x", detail="")
    Rollout.objects.update(not_before=None)
    from rollouts.services.dispatch import dispatch

    assert dispatch() == 1
    attempt = active_attempt(only_rollout())

    claims = together(*[lambda: claim_attempt(attempt_id=attempt.pk, worker=workers["init"])] * 4)

    assert sum(isinstance(claim, Claim) for claim in claims) == 1
    assert claims.count(None) == 3


def _running_claim() -> Claim:
    attempt = Attempt.objects.get(state="running")
    assert attempt.lease_token is not None
    assert attempt.node_id is not None
    return Claim(
        attempt.pk, attempt.rollout_id, attempt.stage, attempt.lease_token, attempt.node_id, 1.0
    )


def test_a_second_finish_of_the_same_claim_loses_and_changes_nothing() -> None:
    workers = make_node()
    make_group()
    claim = bring_to(only_rollout(), "init", workers)
    assert claim is not None

    results = together(lambda: finish_init(claim=claim), lambda: finish_init(claim=claim))

    assert sorted(type(result) for result in results if result is not None) == [LeaseLost]
    assert Attempt.objects.filter(stage="run").count() == 1


@pytest.mark.parametrize("finish_first", [True, False])
def test_a_late_worker_and_the_reaper_write_once(finish_first: bool) -> None:
    workers = make_node()
    make_group()
    claim = bring_to(only_rollout(), "run", workers)
    assert claim is not None

    def finish() -> None:
        finish_run(claim=claim, result=run_result())

    def reap() -> int:
        return recover_attempts_of(worker_id=workers["run"].worker_id)

    first, second = (finish, reap) if finish_first else (reap, finish)
    won, lost = while_open(first, second)

    rollout = only_rollout()
    assert Attempt.objects.filter(state__in=["queued", "running"]).count() == 1
    if finish_first:
        assert (won, lost) == (None, 0)
        assert rollout.state == "eval"
    else:
        assert won == 1
        assert isinstance(lost, LeaseLost)
        assert rollout.state == "run"
        assert active_attempt(rollout).number == 2


@pytest.mark.parametrize("cancel_first", [True, False])
def test_cancel_against_claim_ends_once(cancel_first: bool) -> None:
    workers = make_node()
    make_group()
    rollout = only_rollout()
    claim = bring_to(rollout, "init", workers)
    assert claim is not None
    finish_init(claim=claim)
    attempt = active_attempt(rollout)

    def take() -> Claim | None:
        return claim_attempt(attempt_id=attempt.pk, worker=workers["run"])

    def cancel() -> bool:
        return cancel_rollout(rollout_id=rollout.pk)

    first, second = (cancel, take) if cancel_first else (take, cancel)
    results = while_open(first, second)

    rollout = only_rollout()
    attempt.refresh_from_db()
    if cancel_first:
        assert results == (True, None)
        assert (rollout.state, rollout.outcome) == ("done", "cancelled")
        assert attempt.started_at is None
    else:
        taken, ended = results
        assert isinstance(taken, Claim)
        if not ended:
            finish_cancelled(claim=taken)
        assert (only_rollout().state, only_rollout().outcome) == ("done", "cancelled")
    assert Group.objects.get().done_count == 1


@pytest.mark.parametrize("finish_first", [True, False])
def test_cancel_against_the_last_finish_ends_once(finish_first: bool) -> None:
    workers = make_node()
    make_group()
    rollout = only_rollout()
    claim = bring_to(rollout, "eval", workers)
    assert claim is not None

    def finish() -> None:
        finish_eval(claim=claim, result=eval_result())

    def cancel() -> bool:
        return cancel_rollout(rollout_id=rollout.pk)

    first, second = (finish, cancel) if finish_first else (cancel, finish)
    while_open(first, second)

    rollout = only_rollout()
    assert rollout.state == "done"
    assert rollout.outcome == "scored"
    assert Group.objects.get().done_count == 1


@pytest.mark.parametrize("state", ["queued", "init", "run", "eval"])
def test_cancel_in_each_state_ends_exactly_once(state: str) -> None:
    workers = make_node()
    make_group()
    rollout = only_rollout()
    claim = bring_to(rollout, state, workers)

    ended = cancel_rollout(rollout_id=rollout.pk)

    assert ended is (claim is None)
    if claim is not None:
        finish_cancelled(claim=claim)
    rollout = only_rollout()
    assert (rollout.state, rollout.outcome, rollout.reward) == ("done", "cancelled", None)
    assert Group.objects.get().done_count == 1
    assert not Sandbox.objects.exclude(state__in=["stopping", "gone"]).exists()


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_faults_are_retried_to_the_cap_and_then_the_reward_is_null(stage: str) -> None:
    workers = make_node()
    make_group()
    rollout = only_rollout()
    claim = bring_to(rollout, stage, workers)

    for number in range(1, 4):
        assert claim is not None
        fail_attempt(claim=claim, code="sandbox.start_failed", detail=f"try {number}")
        rollout = only_rollout()
        if number < 3:
            assert rollout.outcome is None
            if rollout.state == "queued":
                Rollout.objects.update(not_before=None)
                claim = bring_to(rollout, stage, workers)
            else:
                claim = claim_active(rollout, workers[stage])

    assert (rollout.state, rollout.outcome) == ("done", "infra_failed")
    assert rollout.reward is None
    assert (rollout.failure_code, rollout.failure_detail) == ("sandbox.start_failed", "try 3")


def test_given_back_attempts_do_not_count() -> None:
    workers = make_node()
    make_group()
    claim = bring_to(only_rollout(), "run", workers)

    for _round in range(5):
        assert claim is not None
        give_back(claim=claim)
        claim = claim_active(only_rollout(), workers["run"])

    assert only_rollout().state == "run"
    assert Attempt.objects.filter(stage="run").count() == 6
