"""The reaper: dead workers, lost messages, dead nodes, overdue work, leases."""

from datetime import timedelta

import pytest
from django.utils import timezone

from rollouts.models import Attempt, Batch, Group, Rollout, Worker
from rollouts.services.batches import lease_batch
from rollouts.services.reap import reap
from rollouts.services.workers import renew_worker
from sandboxes.models import Sandbox
from tests.services.line import active_attempt, bring_to, make_group, make_node
from tests.services.race import together

pytestmark = pytest.mark.django_db(transaction=True)


def expire(worker_id: object) -> None:
    Worker.objects.filter(pk=worker_id).update(
        lease_expires_at=timezone.now() - timedelta(seconds=1)
    )


def test_a_dead_init_worker_sends_the_rollout_back_to_the_queue() -> None:
    workers = make_node()
    make_group()
    bring_to(Rollout.objects.get(), "init", workers)
    expire(workers["init"].worker_id)

    assert (reap().workers, reap().workers) == (1, 0)

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.restarts, rollout.node) == ("queued", 1, None)
    assert Attempt.objects.get().state == "lost"
    assert Sandbox.objects.get().state == "stopping"
    assert renew_worker(worker_id=workers["init"].worker_id) is False


def test_a_dead_run_worker_is_followed_by_another_attempt_on_the_same_node() -> None:
    workers = make_node()
    make_node()
    make_group()
    bring_to(Rollout.objects.get(), "run", workers)
    expire(workers["run"].worker_id)

    reap()

    rollout = Rollout.objects.get()
    attempt = active_attempt(rollout)
    assert (rollout.state, attempt.stage, attempt.number) == ("run", "run", 2)
    assert attempt.node == rollout.node
    assert Sandbox.objects.get().state == "reserved"


def test_without_another_run_worker_on_the_node_it_starts_again_elsewhere() -> None:
    workers = make_node()
    make_group()
    bring_to(Rollout.objects.get(), "run", workers)
    expire(workers["run"].worker_id)

    reap()

    assert Rollout.objects.get().state == "queued"
    assert Sandbox.objects.get().state == "stopping"


def test_many_reapers_at_once_recover_each_attempt_once() -> None:
    workers = make_node(capacity=8)
    make_node(capacity=8)
    make_group(samples=4)
    for rollout in Rollout.objects.all():
        bring_to_run(rollout, workers)
    expire(workers["run"].worker_id)

    results = together(*[reap] * 4)

    assert sum(result.attempts for result in results) == 4
    assert Attempt.objects.filter(stage="run", state="queued").count() == 4
    assert Attempt.objects.filter(stage="run", state="lost").count() == 4


def bring_to_run(rollout: Rollout, workers: dict) -> None:
    from rollouts.services.dispatch import dispatch
    from rollouts.services.finish import finish_init
    from tests.services.line import claim_active

    dispatch()
    finish_init(claim=claim_active(rollout, workers["init"]))
    claim_active(rollout, workers["run"])


def test_a_lost_message_is_published_again_with_a_growing_wait() -> None:
    make_node()
    make_group()
    from rollouts.services.dispatch import dispatch

    dispatch()
    attempt = Attempt.objects.get()
    Attempt.objects.update(published_at=timezone.now() - timedelta(seconds=25))

    assert reap().republished == 1
    attempt.refresh_from_db()
    assert attempt.publish_count == 2

    Attempt.objects.update(published_at=timezone.now() - timedelta(seconds=25))
    assert reap().republished == 0


def test_a_message_to_a_dead_node_is_given_up_and_the_rollout_starts_elsewhere() -> None:
    workers = make_node()
    make_group()
    from rollouts.services.dispatch import dispatch

    dispatch()
    Attempt.objects.update(published_at=timezone.now() - timedelta(seconds=25))
    expire(workers["init"].worker_id)

    reap()

    assert Rollout.objects.get().state == "queued"
    assert Attempt.objects.get().failure_code == "node.no_workers"


def test_overdue_work_of_a_live_worker_is_taken_away() -> None:
    workers = make_node()
    make_group()
    bring_to(Rollout.objects.get(), "eval", workers)
    Attempt.objects.filter(stage="eval").update(
        started_at=timezone.now() - timedelta(hours=3), budget_seconds=10
    )

    assert reap().overdue == 1

    assert Rollout.objects.get().state == "queued"
    assert Attempt.objects.get(stage="eval").failure_code == "eval.overdue"


def test_an_expired_batch_gives_its_groups_back() -> None:
    workers = make_node()
    group = make_group()
    bring_to(Rollout.objects.get(), "done", workers)
    batch = lease_batch(experiment=group.experiment, owner=group.experiment.owner, groups=1)
    assert batch is not None
    Batch.objects.update(lease_expires_at=timezone.now() - timedelta(seconds=1))

    assert (reap().batches, reap().batches) == (1, 0)

    group = Group.objects.get()
    assert (group.state, group.batch) == ("ready", None)
    batch.refresh_from_db()
    assert batch.state == "expired"
