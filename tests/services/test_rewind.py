"""Rewinding: the trainer restarted from an older checkpoint."""

from typing import Any

import pytest

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import Batch, Experiment, Group, Policy, Rollout
from rollouts.services.batches import acknowledge_batch
from rollouts.services.claim import claim_attempt
from rollouts.services.dispatch import dispatch
from rollouts.services.early_end import cancel_leftovers
from rollouts.services.finish import finish_init
from rollouts.services.journal import Step, append_step
from rollouts.services.policy_gate import policy_gate
from rollouts.services.rewind import rewind
from rollouts.states import Stage
from tests import factories
from tests.services.feeding import feed, finish, lease, make_fed, make_tasks, open_groups, refs_of
from tests.services.line import active_attempt, make_worker

pytestmark = pytest.mark.django_db(transaction=True)


def make_experiment(**values: Any) -> Experiment:
    return make_fed(
        make_tasks(40, name="a"),
        **{"batch_groups": 2, "feed_settings": {"shuffle": False}, **values},
    )


def set_version(experiment: Experiment, version: int) -> None:
    Policy.objects.filter(pk=experiment.policy_id).update(version=version)


def train(experiment: Experiment, versions: list[int]) -> list[Batch]:
    """Lease and acknowledge a batch at each version, whose groups were sampled at it."""
    batches = []
    for version in versions:
        set_version(experiment, version)
        feed(experiment)
        for group in open_groups(experiment)[:2]:
            finish(group, version=version)
        batch = lease(experiment, 2)
        assert batch is not None
        acknowledge_batch(batch_id=batch.pk)
        batches.append(batch)
    set_version(experiment, versions[-1] + 1)
    return batches


def states(experiment: Experiment) -> list[tuple[str, str, str]]:
    rows = Group.objects.filter(experiment=experiment).order_by("sequence")
    return list(rows.values_list("task__ref", "state", "filter_rule"))


def test_what_was_given_out_since_is_open_again_or_drawn_anew() -> None:
    experiment = make_experiment()
    kept, same, newer = train(experiment, [3, 4, 5])
    assert policy_gate().open(str(experiment.policy_id), "nobody", epoch=0) is False

    done = rewind(experiment_id=experiment.pk, version=4)

    assert (done.version, done.batches, done.groups_ready) == (4, 2, 2)
    assert (done.groups_filtered, done.tasks_returned, done.rollouts_cancelled) == (2, 2, 0)
    policy = Policy.objects.get()
    assert (policy.version, policy.weights_epoch) == (4, 1)
    found = dict(Batch.objects.values_list("pk", "state"))
    assert found == {kept.pk: "acknowledged", same.pk: "rewound", newer.pk: "rewound"}
    assert states(experiment)[:6] == [
        ("a-000", "consumed", ""),
        ("a-001", "consumed", ""),
        ("a-002", "ready", ""),
        ("a-003", "ready", ""),
        ("a-004", "filtered", "rewound"),
        ("a-005", "filtered", "rewound"),
    ]
    again = lease(experiment, 2)
    assert again is not None
    assert refs_of(again) == ["a-002", "a-003"]
    assert again.repeats == same
    experiment.refresh_from_db()
    assert feed(experiment)[:2] == ["a-004", "a-005"]
    returned = open_groups(experiment)[-2:]
    assert [(group.epoch, group.position) for group in returned] == [(0, 4), (0, 5)]


def test_the_present_version_opens_what_was_given_out_at_it_and_keeps_what_runs() -> None:
    experiment = make_experiment()
    (batch,) = train(experiment, [3])
    set_version(experiment, 3)
    feed(experiment)
    before = states(experiment)

    done = rewind(experiment_id=experiment.pk, version=3)

    assert (done.batches, done.groups_ready, done.groups_filtered) == (1, 2, 0)
    assert Batch.objects.get().state == "rewound"
    assert Policy.objects.get().version == 3
    assert states(experiment) == [
        (ref, "ready" if state == "consumed" else state, rule) for ref, state, rule in before
    ]
    with pytest.raises(StateConflict, match="rewound"):
        acknowledge_batch(batch_id=batch.pk)


def test_doing_it_again_changes_nothing_more() -> None:
    experiment = make_experiment()
    train(experiment, [3, 4, 5])
    rewind(experiment_id=experiment.pk, version=4)
    before = states(experiment)

    again = rewind(experiment_id=experiment.pk, version=4)

    assert (again.batches, again.groups_ready, again.groups_filtered) == (0, 0, 0)
    assert states(experiment) == before


def test_a_batch_that_is_still_leased_is_taken_back_too() -> None:
    experiment = make_experiment()
    feed(experiment)
    for group in open_groups(experiment)[:2]:
        finish(group, version=3)
    batch = lease(experiment, 2)
    assert batch is not None

    rewind(experiment_id=experiment.pk, version=2, force=False)

    batch.refresh_from_db()
    assert batch.state == "rewound"
    assert batch.closed_at is not None
    assert {rule for _ref, _state, rule in states(experiment)[:2]} == {"rewound"}


def test_what_is_under_way_is_cancelled_where_it_sampled_a_newer_version() -> None:
    experiment = make_experiment(group_size=2, batch_groups=4)
    feed(experiment)
    workers = {stage: make_worker(stage, concurrency=3) for stage in Stage.values}
    finished, generating, waiting, queued, *rest = open_groups(experiment)
    # One sample of the first group is done, at a newer version.
    first = Rollout.objects.filter(group=finished).order_by("sample")[0]
    Rollout.objects.exclude(group__in=[generating, waiting]).update(priority=-9)
    Rollout.objects.filter(sample=1).update(priority=-9)
    Rollout.objects.filter(pk=first.pk).update(priority=9)
    assert dispatch() == 3
    for rollout in Rollout.objects.filter(state="init"):
        claim = claim_attempt(attempt_id=active_attempt(rollout).pk, worker=workers["init"])
        assert claim is not None
        finish_init(claim=claim)
    runner = Rollout.objects.get(group=generating, sample=0)
    claim = claim_attempt(attempt_id=active_attempt(runner).pk, worker=workers["run"])
    assert claim is not None
    journaled = Rollout.objects.get(group=waiting, sample=0)
    held = claim_attempt(attempt_id=active_attempt(journaled).pk, worker=workers["run"])
    assert held is not None
    append_step(
        claim=held,
        step=Step(0, "sampled", {"token_ids": [1], "policy_version": 3, "version_runs": [[3, 1]]}),
    )

    done = rewind(experiment_id=experiment.pk, version=3)
    assert (done.groups_filtered, done.rollouts_cancelled) == (0, 0)
    set_version(experiment, 4)
    done = rewind(experiment_id=experiment.pk, version=3)

    # Both are in RUN in a worker's hands: what they sample now is of the newer version.
    assert (done.groups_filtered, done.tasks_returned, done.rollouts_cancelled) == (2, 2, 4)
    found = dict(Group.objects.filter(experiment=experiment).values_list("pk", "filter_rule"))
    assert (found[generating.pk], found[waiting.pk]) == ("rewound", "rewound")
    assert {found[group.pk] for group in (finished, queued, *rest)} == {""}
    assert cancel_leftovers(experiment_id=experiment.pk) == 4
    runner.refresh_from_db()
    assert runner.cancel_requested_at is not None
    assert Rollout.objects.get(group=generating, sample=1).outcome == "cancelled"


def test_what_a_worker_left_of_a_newer_version_is_found_in_the_journal() -> None:
    experiment = make_experiment(batch_groups=1, feed_settings={"groups_in_flight": 1})
    feed(experiment)
    workers = {stage: make_worker(stage) for stage in Stage.values}
    rollout = Rollout.objects.get()
    dispatch()
    claim = claim_attempt(attempt_id=active_attempt(rollout).pk, worker=workers["init"])
    assert claim is not None
    finish_init(claim=claim)
    held = claim_attempt(attempt_id=active_attempt(rollout).pk, worker=workers["run"])
    assert held is not None
    body = {"token_ids": [1, 2], "policy_version": None, "version_runs": [[3, 1], [4, 1]]}
    append_step(claim=held, step=Step(0, "sampled", body))

    done = rewind(experiment_id=experiment.pk, version=3)  # which is the present one

    assert (done.groups_filtered, done.rollouts_cancelled) == (1, 1)
    assert Group.objects.get().filter_rule == "rewound"


def test_a_newer_version_is_no_rewind() -> None:
    experiment = make_experiment()

    with pytest.raises(InvalidValue, match="at version 3: a rewind leads back, not to 4"):
        rewind(experiment_id=experiment.pk, version=4)


def test_an_open_update_is_ended_first() -> None:
    experiment = make_experiment()
    factories.make_policy_update(policy=experiment.policy)

    with pytest.raises(StateConflict, match="Update 1 to version 4 is ready: complete or abandon"):
        rewind(experiment_id=experiment.pk, version=2)

    assert Policy.objects.get().version == 3


def test_servers_must_serve_the_version_before_anything_changes() -> None:
    experiment = make_experiment()
    server = factories.make_server(policy=experiment.policy)  # nothing listens there
    train(experiment, [3])

    with pytest.raises(StateConflict, match="Not every server serves version 3") as refused:
        rewind(experiment_id=experiment.pk, version=3)

    assert refused.value.code == "policy.version_mismatch"
    assert f"{server.url} cannot be asked" in str(refused.value)
    assert (Policy.objects.get().version, Batch.objects.get().state) == (4, "acknowledged")


def test_other_experiments_of_the_policy_are_named_unless_it_is_forced() -> None:
    experiment = make_experiment()
    other = factories.make_experiment(policy=experiment.policy, name="other")
    factories.make_experiment(policy=experiment.policy, name="over", state="stopped")
    factories.make_experiment(policy=experiment.policy, name="measured", purpose="evaluation")

    with pytest.raises(StateConflict) as refused:
        rewind(experiment_id=experiment.pk, version=2)

    assert refused.value.code == "policy.shared"
    assert f"would go back with it: other ({other.pk})." in str(refused.value)
    assert Policy.objects.get().version == 3
    assert rewind(experiment_id=experiment.pk, version=2, force=True).version == 2
    assert rewind(experiment_id=other.pk, version=2).version == 2


def test_an_experiment_that_was_stopped_stays_so() -> None:
    experiment = make_experiment()
    Experiment.objects.update(state="stopped")

    with pytest.raises(StateConflict, match="stopped"):
        rewind(experiment_id=experiment.pk, version=3)
