"""Stopping and cancelling against submissions, retries and sheer numbers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from rollouts.exceptions import StateConflict
from rollouts.models import Experiment, Group, Rollout
from rollouts.services import reap as reap_module
from rollouts.services.cancel import cancel_group, stop_experiment
from rollouts.services.dispatch import dispatch
from rollouts.services.finish import fail_attempt
from rollouts.services.requeue import retry_rollout
from rollouts.services.submit import GroupRequest, submit_groups
from sandboxes.models import Sandbox
from tests.services.line import bring_to, make_experiment, make_group, make_node, make_task
from tests.services.race import while_open

pytestmark = pytest.mark.django_db(transaction=True)


def test_groups_submitted_after_a_stop_that_the_caller_did_not_see_are_refused() -> None:
    make_node()
    experiment, task = make_experiment(), make_task()
    seen = Experiment.objects.get(pk=experiment.pk)
    assert stop_experiment(experiment_id=experiment.pk) == 0
    assert seen.state == "active"

    with pytest.raises(StateConflict) as refused:
        submit_groups(experiment=seen, requests=[GroupRequest(task=task.pk, samples=2)])

    assert refused.value.code == "experiment.stopped"
    assert (Group.objects.count(), Rollout.objects.count(), dispatch()) == (0, 0, 0)


def test_groups_submitted_while_a_stop_is_being_written_are_refused() -> None:
    experiment, task = make_experiment(), make_task()

    stopped, submitted = while_open(
        lambda: stop_experiment(experiment_id=experiment.pk),
        lambda: submit_groups(
            experiment=experiment, requests=[GroupRequest(task=task.pk, samples=2)]
        ),
    )

    assert stopped == 0
    assert isinstance(submitted, StateConflict)
    assert submitted.code == "experiment.stopped"
    assert (Group.objects.count(), Rollout.objects.count()) == (0, 0)


def test_groups_that_are_being_submitted_when_a_stop_comes_are_cancelled() -> None:
    make_node()
    experiment, task = make_experiment(), make_task()

    submitted, stopped = while_open(
        lambda: submit_groups(
            experiment=experiment, requests=[GroupRequest(task=task.pk, samples=2)]
        ),
        lambda: stop_experiment(experiment_id=experiment.pk),
    )

    assert (len(submitted), stopped) == (1, 2)
    group = Group.objects.get()
    assert (group.state, group.done_count) == ("cancelled", 2)
    assert list(Rollout.objects.values_list("state", "outcome")) == [("done", "cancelled")] * 2
    assert dispatch() == 0


def retry_and_start(rollout: Rollout) -> int:
    with transaction.atomic():
        retry_rollout(rollout_id=rollout.pk)
        return dispatch()


def ended_with_its_sandbox_present() -> Rollout:
    workers = make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    fail_attempt(claim=claim, code="x", detail="", retryable=False)
    Sandbox.objects.update(state="ready")
    return Rollout.objects.get()


def test_the_sweep_leaves_the_new_sandbox_of_a_rollout_retried_amid_it_alone() -> None:
    rollout = ended_with_its_sandbox_present()
    started: list[int] = []

    def retried() -> int:
        try:
            return retry_and_start(rollout)
        finally:
            connection.close()

    def between(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith('UPDATE "sandboxes_sandbox"') and not started:
            with ThreadPoolExecutor(1) as pool:
                started.append(pool.submit(retried).result(timeout=30))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(between):
        reap_module._sweep_leftovers()

    assert started == [1]
    assert sorted(Sandbox.objects.values_list("state", flat=True)) == ["reserved", "stopping"]
    assert Rollout.objects.get().state == "init"


def test_the_sweep_leaves_the_new_sandbox_alone_when_it_waits_for_the_retry() -> None:
    rollout = ended_with_its_sandbox_present()

    started, swept = while_open(lambda: retry_and_start(rollout), reap_module._sweep_leftovers)

    assert (started, swept) == (1, 0)
    assert sorted(Sandbox.objects.values_list("state", flat=True)) == ["reserved", "stopping"]


def queries_of(cancel: Any) -> int:
    with CaptureQueriesContext(connection) as asked:
        cancel()
    return len(asked)


def test_cancelling_a_group_asks_no_more_for_many_queued_rollouts_than_for_few() -> None:
    few, many = make_group(samples=2), make_group(samples=300)

    asked_for_few = queries_of(lambda: cancel_group(group_id=few.pk))
    asked_for_many = queries_of(lambda: cancel_group(group_id=many.pk))

    assert asked_for_many == asked_for_few
    assert list(Group.objects.values_list("state", "done_count")) == [
        ("cancelled", 2),
        ("cancelled", 300),
    ]
    assert Rollout.objects.filter(state="done", outcome="cancelled").count() == 302
    assert not Rollout.objects.filter(cancel_requested_at__isnull=True).exists()


def test_stopping_an_experiment_asks_no_more_for_many_queued_groups_than_for_few() -> None:
    small, large = make_experiment(), make_experiment()
    task = make_task()
    for experiment, groups in ((small, 2), (large, 60)):
        requests = [GroupRequest(task=task.pk, samples=3)] * groups
        submit_groups(experiment=experiment, requests=requests)

    asked_for_few = queries_of(lambda: stop_experiment(experiment_id=small.pk))
    asked_for_many = queries_of(lambda: stop_experiment(experiment_id=large.pk))

    assert asked_for_many == asked_for_few
    assert set(Group.objects.values_list("state", "done_count")) == {("cancelled", 3)}
    assert Rollout.objects.unfinished().count() == 0


def test_cancelling_a_group_tells_workers_and_ends_what_waits() -> None:
    workers = make_node(capacity=1)
    group = make_group(samples=3)
    at_work = Rollout.objects.order_by("sample")[0]
    bring_to(at_work, "run", workers)

    assert cancel_group(group_id=group.pk) == 3

    group.refresh_from_db()
    assert (group.state, group.done_count) == ("cancelled", 2)
    at_work.refresh_from_db()
    assert (at_work.state, at_work.cancel_requested_at is not None) == ("run", True)
    assert dispatch() == 0
