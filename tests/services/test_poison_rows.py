"""Rows that this release does not understand, and steps that raise, stop nobody else's work."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from rollouts.models import Attempt, Batch, Experiment, Group, Rollout, Worker
from rollouts.options import Budgets, Sampling
from rollouts.services import dispatch as dispatch_module
from rollouts.services import reap as reap_module
from rollouts.services.batches import lease_batch
from rollouts.services.cancel import cancel_rollout
from rollouts.services.dispatch import dispatch
from rollouts.services.reap import Reaped, reap, recover_orphans
from rollouts.services.workers import Registration
from sandboxes.models import Sandbox
from tests.services.line import (
    active_attempt,
    bring_to,
    claim_active,
    make_experiment,
    make_group,
    make_node,
)

pytestmark = pytest.mark.django_db(transaction=True)

UNKNOWN: list[Any] = [
    {"an_option_of_another_release": 1},
    {"init_seconds": "soon"},
    {"init_seconds": -1},
    ["init_seconds"],
    None,
]


def expire(worker: Registration) -> None:
    Worker.objects.filter(pk=worker.worker_id).update(
        lease_expires_at=timezone.now() - timedelta(seconds=1)
    )


@pytest.mark.parametrize("stored", UNKNOWN)
def test_stored_options_fall_back_to_the_defaults(stored: Any) -> None:
    assert Budgets.stored(stored) == Budgets()
    assert Sampling.stored(stored) == Sampling()


def test_what_is_known_beside_unknown_options_holds() -> None:
    stored = {"run_seconds": 7, "another": 1, "eval_seconds": "x"}

    assert Budgets.stored(stored) == Budgets(run_seconds=7.0)


@pytest.mark.parametrize("stored", UNKNOWN[:-1])
def test_unknown_options_stop_neither_their_own_rollout_nor_others(stored: Any) -> None:
    make_node()
    odd, plain = make_group(), make_group(experiment=make_experiment(budgets={"init_seconds": 9}))
    Experiment.objects.filter(pk=odd.experiment_id).update(budgets=stored)

    assert dispatch() == 2

    budgets = dict(Attempt.objects.values_list("rollout__group_id", "budget_seconds"))
    assert budgets == {odd.pk: Budgets().init_seconds, plain.pk: 9.0}


def test_a_rollout_that_cannot_be_started_ends_and_the_others_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_node(capacity=3)
    group = make_group(samples=3)
    broken = Rollout.objects.order_by("sample")[0]
    real = dispatch_module.reserve_sandbox

    def reserve(*, owner: UUID, **values: Any) -> Sandbox:
        if owner == broken.pk:
            raise ValueError("no such\0purpose")
        return real(owner=owner, **values)

    monkeypatch.setattr(dispatch_module, "reserve_sandbox", reserve)

    assert dispatch() == 2

    broken.refresh_from_db()
    assert (broken.state, broken.outcome, broken.failure_code) == (
        *("done", "infra_failed", "dispatch.failed"),
    )
    assert broken.failure_detail == "ValueError: no such\ufffdpurpose"
    assert broken.node is None
    assert not Attempt.objects.filter(rollout=broken).exists()
    assert Rollout.objects.filter(state="init").count() == 2
    group.refresh_from_db()
    assert group.done_count == 1


def test_the_reaper_recovers_a_rollout_with_unknown_options() -> None:
    workers = make_node()
    make_node()
    make_group()
    bring_to(Rollout.objects.get(), "run", workers)
    Experiment.objects.update(budgets={"an_option_of_another_release": 1})
    expire(workers["run"])

    reaped = reap()

    assert (reaped.workers, reaped.attempts) == (1, 1)
    attempt = active_attempt(Rollout.objects.get())
    assert (attempt.stage, attempt.number) == ("run", 2)
    assert attempt.budget_seconds == Budgets().of_stage("run")


STEPS = {
    "workers": "_bury_workers",
    "attempts": "_recover_attempts",
    "overdue": "_give_up_overdue",
    "republished": "_republish",
    "cancelled": "_finish_cancels",
    "leftovers": "_sweep_leftovers",
    "batches": "expire_batches",
    "overdue_groups": "close_overdue_groups",
    "ended_early": "end_all_early",
    "left_running": "cancel_leftovers",
    "forgotten_calls": "forget_old_calls",
}


def work_for_every_step() -> None:
    """Leave one thing to do for each step of the reaper but the forgetting of old calls."""
    workers = make_node("busy", capacity=8)
    make_node("busy", capacity=8)
    scored = make_group()
    bring_to(Rollout.objects.get(), "done", workers)
    assert lease_batch(experiment=scored.experiment, owner=scored.experiment.owner, groups=1)
    Batch.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=1))
    Sandbox.objects.update(state="ready")  # leftovers: their rollout is done
    overdue, asked, waiting, left = (make_group() for _each in range(4))
    assert dispatch() == 4
    claim_active(Rollout.objects.get(group=left), workers["init"])
    Group.objects.filter(pk=left.pk).update(state="cancelled")
    claim_active(Rollout.objects.get(group=overdue), workers["init"])
    Attempt.objects.filter(rollout__group=overdue).update(
        started_at=timezone.now() - timedelta(hours=3)
    )
    claim_active(Rollout.objects.get(group=asked), workers["init"])
    assert cancel_rollout(rollout_id=Rollout.objects.get(group=asked).pk) is False
    Attempt.objects.filter(rollout__group=asked).update(state="lost", ended_at=timezone.now())
    Attempt.objects.filter(rollout__group=waiting).update(
        published_at=timezone.now() - timedelta(hours=1)
    )
    gone = make_node("gone", capacity=100)
    make_group()
    assert dispatch() == 1
    claim_active(Rollout.objects.get(node__name="gone"), gone["init"])
    expire(gone["init"])
    Group.objects.filter(pk=make_group().pk).update(deadline_at=timezone.now())
    full = make_experiment()
    Experiment.objects.filter(pk=full.pk).update(
        feed="pull", feed_settings={"batch_groups": 1}, selection={"unfinished": "cancel"}
    )
    ready, _still_open = (make_group(experiment=full) for _each in range(2))
    Group.objects.filter(pk=ready.pk).update(state="ready", done_count=1)


@pytest.mark.parametrize("broken", [None, *STEPS])
def test_a_step_that_raises_does_not_keep_the_others_from_their_work(
    broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_for_every_step()
    expected = {
        **{"workers": 1, "attempts": 1, "overdue": 1, "republished": 1, "cancelled": 1},
        **{"leftovers": 2, "batches": 1, "forgotten_calls": 0},
        **{"overdue_groups": 1, "ended_early": 1, "left_running": 1},
    }
    if broken is not None:

        def fail(*_args: Any, **_values: Any) -> int:
            raise ValueError("a row that nobody foresaw")

        monkeypatch.setattr(reap_module, STEPS[broken], fail)
        expected[broken] = 0
    if broken == "workers":
        expected["attempts"] = 0  # nobody was buried, so nothing of theirs is recovered

    assert reap() == Reaped(**expected)


def test_one_attempt_that_cannot_be_recovered_does_not_keep_the_next_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = make_node()
    make_group(samples=3)
    assert dispatch() == 3
    for rollout in Rollout.objects.all():
        claim_active(rollout, workers["init"])
    broken = Rollout.objects.order_by("sample")[1]
    real = reap_module.after_fault

    def after_fault(*, rollout_id: UUID, **values: Any) -> None:
        if rollout_id == broken.pk:
            raise ValueError("a row that nobody foresaw")
        real(rollout_id=rollout_id, **values)

    monkeypatch.setattr(reap_module, "after_fault", after_fault)
    expire(workers["init"])

    assert reap().attempts == 2

    states = Rollout.objects.order_by("sample").values_list("state", flat=True)
    assert list(states) == ["queued", "init", "queued"]
    assert active_attempt(broken).state == "running"
    monkeypatch.setattr(reap_module, "after_fault", real)
    assert reap().attempts == 1
    assert Rollout.objects.filter(state="queued").count() == 3


def test_an_attempt_whose_end_was_not_written_is_recovered_although_its_worker_lives() -> None:
    workers = make_node()
    make_group(samples=4)
    assert dispatch() == 4
    unwritten, held, fresh, others = Rollout.objects.order_by("sample")
    other = make_node()["init"]
    claims = [claim_active(each, workers["init"]) for each in (unwritten, held, fresh)]
    claim_active(others, other)
    Attempt.objects.exclude(rollout=fresh).update(started_at=timezone.now() - timedelta(minutes=5))

    recovered = recover_orphans(worker_id=workers["init"].worker_id, held=[claims[1].attempt_id])

    assert recovered == 1
    attempt = Attempt.objects.get(pk=claims[0].attempt_id)
    assert (attempt.state, attempt.failure_code) == ("lost", "init.end_unwritten")
    assert [active_attempt(each).state for each in (held, fresh, others)] == ["running"] * 3
    unwritten.refresh_from_db()
    assert unwritten.state == "queued"
