"""The journal against what takes a rollout away: one lock order, so that nobody deadlocks."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from rollouts.exceptions import LeaseLost
from rollouts.models import Attempt, JournalEntry, Rollout
from rollouts.services.cancel import cancel_rollout
from rollouts.services.claim import Claim
from rollouts.services.journal import Step, append_step
from rollouts.services.reap import recover_attempts_of
from rollouts.services.workers import Registration
from tests.services.line import bring_to, make_group, make_node
from tests.services.race import together, while_open

pytestmark = pytest.mark.django_db(transaction=True)

ROUNDS = 20_000
STEP = Step(0, "sampled", {"token_ids": [1]})


def running() -> tuple[Claim, Registration]:
    """Return the claim of a rollout in RUN and its worker; the node has another RUN worker."""
    workers = make_node()
    make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    return claim, workers["run"]


def someone_waits_for_us() -> bool:
    """Tell whether another backend waits for this one; pg_stat_activity is frozen in here."""
    with connection.connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks "
            "WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"
        )
        return bool(cursor.fetchone()[0])


def halted_with_the_rollout_locked(
    taker: Callable[[], Any], writer: Callable[[], Any]
) -> tuple[Any, Any]:
    """Run `taker` until it has the rollout's row, then `writer` until it waits, then the rest."""
    has_rollout = threading.Event()

    def halt(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        locks = "FOR UPDATE" in sql and 'FROM "rollouts_rollout"' in sql
        if locks and not has_rollout.is_set():
            has_rollout.set()
            assert any(someone_waits_for_us() for _round in range(ROUNDS))
        return result

    def taking() -> Any:
        with connection.execute_wrapper(halt):
            return taker()

    def writing() -> Any:
        assert has_rollout.wait(timeout=30)
        return writer()

    taken, written = together(taking, writing)
    return taken, written


def test_a_cancel_amid_a_journaled_step_neither_deadlocks_nor_loses_the_step() -> None:
    claim, _worker = running()

    taken, written = halted_with_the_rollout_locked(
        lambda: cancel_rollout(rollout_id=claim.rollout_id),
        lambda: append_step(claim=claim, step=STEP),
    )

    assert (taken, written) == (False, False)
    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.turns) == ("run", 1)
    assert rollout.cancel_requested_at is not None
    assert JournalEntry.objects.count() == 1


def test_a_reaper_amid_a_journaled_step_wins_and_the_step_is_refused() -> None:
    claim, worker = running()

    taken, written = halted_with_the_rollout_locked(
        lambda: recover_attempts_of(worker_id=worker.worker_id),
        lambda: append_step(claim=claim, step=STEP),
    )

    assert taken == 1
    assert isinstance(written, LeaseLost)
    assert JournalEntry.objects.count() == 0
    assert list(Attempt.objects.filter(stage="run").values_list("number", "state")) == [
        (1, "lost"),
        (2, "queued"),
    ]


def test_a_cancel_waits_for_a_step_that_is_being_written() -> None:
    claim, _worker = running()

    written, taken = while_open(
        lambda: append_step(claim=claim, step=STEP),
        lambda: cancel_rollout(rollout_id=claim.rollout_id),
    )

    assert (written, taken) == (False, False)
    assert JournalEntry.objects.count() == 1


def test_a_reaper_waits_for_a_step_that_is_being_written() -> None:
    claim, worker = running()

    written, taken = while_open(
        lambda: append_step(claim=claim, step=STEP),
        lambda: recover_attempts_of(worker_id=worker.worker_id),
    )

    assert (written, taken) == (False, 1)
    assert JournalEntry.objects.count() == 1
    assert Attempt.objects.get(pk=claim.attempt_id).state == "lost"


def test_a_step_is_counted_onto_what_another_wrote_while_it_waited() -> None:
    claim, _worker = running()
    rollouts = Rollout.objects.filter(pk=claim.rollout_id)

    while_open(
        lambda: rollouts.update(sampled_tokens=5, restarts=2),
        lambda: append_step(claim=claim, step=STEP),
    )

    assert rollouts.values_list("turns", "sampled_tokens", "restarts").get() == (1, 6, 2)
    assert JournalEntry.objects.get().restarts == 2
