"""The dispatcher: slots, order, shares, nodes."""

from collections import Counter

import pytest
from django.utils import timezone

from rollouts.models import Attempt, Experiment, Rollout, Worker
from rollouts.services.dispatch import dispatch
from sandboxes.models import Node, Sandbox
from tests.services.line import (
    bring_to,
    make_experiment,
    make_group,
    make_node,
    make_task,
    make_worker,
)
from tests.services.race import together

pytestmark = pytest.mark.django_db(transaction=True)


def test_nothing_starts_without_live_workers_for_every_stage() -> None:
    make_worker("init")
    make_worker("run")
    make_group(samples=2)

    assert dispatch() == 0

    make_worker("eval")
    assert dispatch() == 2


def test_only_free_slots_are_filled_and_a_slot_is_free_when_its_sandbox_is_gone() -> None:
    make_node(capacity=3)
    make_group(samples=5)

    assert dispatch() == 3
    assert dispatch() == 0
    sandbox = Sandbox.objects.first()
    assert sandbox is not None
    Sandbox.objects.filter(pk=sandbox.pk).update(state="gone", gone_at=timezone.now())

    assert dispatch() == 1
    assert Attempt.objects.filter(stage="init", state="queued").count() == 4


def test_concurrent_dispatchers_never_exceed_the_slots() -> None:
    make_node(capacity=5)
    make_group(samples=20)

    started = together(*[dispatch] * 6)

    assert sum(started) == 5
    assert Sandbox.objects.present().count() == 5


def test_higher_priority_first_then_start_order() -> None:
    make_node(capacity=3)
    experiment = make_experiment()
    first = make_group(experiment=experiment, samples=2)
    urgent = make_group(experiment=experiment, samples=2, priority=5)

    dispatch()

    started = Counter(Rollout.objects.filter(state="init").values_list("group_id", flat=True))
    assert started == {urgent.pk: 2, first.pk: 1}


def test_experiments_share_slots_by_weight() -> None:
    make_node(capacity=8)
    heavy, light = make_experiment(share=3), make_experiment(share=1)
    task = make_task()
    make_group(experiment=heavy, task=task, samples=20)
    make_group(experiment=light, task=task, samples=20)

    dispatch()

    started = Counter(Rollout.objects.filter(state="init").values_list("experiment_id", flat=True))
    assert started == {heavy.pk: 6, light.pk: 2}


def test_paused_experiments_and_waiting_retries_do_not_start() -> None:
    make_node(capacity=8)
    group = make_group(samples=3)
    Experiment.objects.update(state="paused")
    assert dispatch() == 0

    Experiment.objects.update(state="active")
    later = Rollout.objects.filter(group=group, sample=0)
    later.update(not_before=timezone.now() + timezone.timedelta(hours=1))
    assert dispatch() == 2


def test_draining_and_dead_nodes_get_nothing_and_load_is_spread() -> None:
    make_node("a", capacity=4)
    make_node("b", capacity=4)
    make_node("drained", capacity=4)
    make_node("dead", capacity=4)
    Node.objects.filter(name="drained").update(draining=True)
    Worker.objects.filter(node__name="dead", stage="run").update(lease_expires_at=timezone.now())
    make_group(samples=6)

    assert dispatch() == 6

    assert Counter(Rollout.objects.values_list("node__name", flat=True)) == {"a": 3, "b": 3}


def test_rollouts_without_a_sandbox_need_no_slot() -> None:
    make_node(capacity=0)
    make_group(task=make_task(sandbox=False), samples=3)

    assert dispatch() == 3

    assert Sandbox.objects.count() == 0
    assert set(Attempt.objects.values_list("node_id", flat=True)) == {None}


def test_the_slot_is_kept_from_run_to_eval() -> None:
    workers = make_node(capacity=1)
    make_group(samples=2)
    rollout = Rollout.objects.order_by("sample")[0]

    bring_to(rollout, "eval", workers)

    assert sorted(Sandbox.objects.present().values_list("purpose", flat=True)) == ["grade", "run"]
    assert dispatch() == 0
