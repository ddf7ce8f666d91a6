"""Experiments and groups: checked options, narrow writes, pause, resume, stop, cancel."""

import json

import pytest

from rollouts.models import Experiment, Group, Policy, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services.feed import feed_experiment
from tests.admin.factories import (
    end,
    make_experiment,
    make_group,
    make_policy,
    make_rollout,
    make_task,
    make_user,
)

pytestmark = pytest.mark.django_db


def form_of(experiment: Experiment, **changes: object) -> dict[str, object]:
    """Return what the browser sends for an experiment."""
    values = {
        "owner": experiment.owner_id,
        "name": experiment.name,
        "policy": experiment.policy_id,
        "group_size": experiment.group_size,
        "sampling": json.dumps(experiment.sampling),
        "budgets": json.dumps(experiment.budgets),
        "priority": experiment.priority,
        "share": experiment.share,
        "max_attempts": experiment.max_attempts,
        "failure_reward": experiment.failure_reward,
        "max_policy_lag": "" if experiment.max_policy_lag is None else experiment.max_policy_lag,
        "on_policy_lag": experiment.on_policy_lag,
        "feed": experiment.feed,
        "feed_settings": json.dumps(experiment.feed_settings),
        "filters": json.dumps(experiment.filters),
        "selection": json.dumps(experiment.selection),
        "task_sets": [row.pk for row in experiment.task_sets.all()] if experiment.pk else [],
    }
    return {**values, **changes}


def test_a_new_experiment_gets_defaults_for_what_is_left_out(operator) -> None:
    owner, policy, task = make_user(), make_policy(), make_task()
    draft = Experiment(owner=owner, policy=policy, name="new", group_size=4)
    form = form_of(
        draft, sampling='{"temperature": 0.7}', budgets="{}", task_sets=[task.task_set_id]
    )

    answer = operator.post(Experiment, "add", form)

    assert answer.status_code == 302
    made = Experiment.objects.get(name="new")
    assert made.sampling == {**Sampling().as_dict(), "temperature": 0.7}
    assert made.budgets == Budgets().as_dict()
    assert (made.owner, made.policy, made.group_size, made.state) == (owner, policy, 4, "active")
    assert list(made.task_sets.all()) == [task.task_set]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sampling", '{"temperature": -1}', "temperature must be between 0 and 10, not -1."),
        (
            "sampling",
            '{"heat": 1}',
            "Unknown sampling key 'heat'; known: temperature, top_p, top_k, max_tokens, seed.",
        ),
        ("sampling", "[1]", "sampling must be an object."),
        ("budgets", '{"max_turns": 0.5}', "max_turns must be between 1 and 10000, not 0.5."),
        ("budgets", '{"run_seconds": "long"}', "run_seconds must be a number, not 'long'."),
        (
            "feed_settings",
            '{"epochs": 0}',
            "feed_settings.epochs must be between 1 and 1000000, not 0.",
        ),
        ("selection", '{"order": "any"}', "order must be start or finished, not 'any'."),
        ("filters", "{}", 'filters must be a list such as [{"rule": "no_variance"}].'),
        ("group_size", 0, "Ensure this value is greater than or equal to 1."),
        ("share", 0, "Ensure this value is greater than or equal to 1."),
    ],
)
def test_wrong_options_are_refused_and_nothing_changes(operator, field, value, reason) -> None:
    experiment = make_experiment()
    before = Experiment.objects.values().get(pk=experiment.pk)

    answer = operator.post(
        Experiment, "change", form_of(experiment, **{field: value}), experiment.pk
    )

    assert answer.context["adminform"].form.errors[field] == [reason]
    assert Experiment.objects.values().get(pk=experiment.pk) == before


def test_a_pulling_experiment_is_made_and_changed_and_shows_what_its_feed_does(operator) -> None:
    owner, policy, task = make_user(), make_policy(), make_task()
    draft = Experiment(owner=owner, policy=policy, name="new", group_size=4, feed="pull")
    sets = [task.task_set_id]
    lacking = operator.post(Experiment, "add", form_of(draft, task_sets=sets))
    settings = '{"batch_groups": 2, "epochs": 1}'
    form = form_of(draft, task_sets=sets, feed_settings=settings, max_policy_lag=0)

    answer = operator.post(Experiment, "add", form)

    assert "batch_groups is needed to pull" in str(lacking.context["adminform"].form.errors)
    assert answer.status_code == 302
    made = Experiment.objects.get(name="new")
    assert (made.feed, made.feed_settings["batch_groups"]) == ("pull", 2)
    assert made.selection["unfinished"] == "cancel"
    assert feed_experiment(experiment_id=made.pk) == 1
    page = operator.get(Experiment, "change", made.pk).content.decode()
    assert "epoch 1 of 1 is used up" in page
    made.refresh_from_db()
    changed = form_of(made, feed_settings='{"batch_groups": 2, "epochs": 3}')
    assert operator.post(Experiment, "change", changed, made.pk).status_code == 302
    made.refresh_from_db()
    assert (made.feed, made.feed_settings["epochs"]) == ("pull", 3)


def test_a_change_writes_only_what_was_changed(operator) -> None:
    experiment = make_experiment()
    form = form_of(experiment, priority=9)
    Experiment.objects.filter(pk=experiment.pk).update(state="paused", share=5)

    operator.post(Experiment, "change", {**form, "share": 5}, experiment.pk)

    experiment.refresh_from_db()
    assert (experiment.priority, experiment.state, experiment.share) == (9, "paused", 5)


def test_a_policys_version_raised_by_a_trainer_survives_an_edit(operator) -> None:
    policy = make_policy(version=3)
    form = {
        "model": "other",
        "tokenizer": policy.tokenizer,
        "context_tokens": 4096,
        "servers-TOTAL_FORMS": 0,
        "servers-INITIAL_FORMS": 0,
        "updates-TOTAL_FORMS": 0,
        "updates-INITIAL_FORMS": 0,
    }
    Policy.objects.filter(pk=policy.pk).update(version=4)

    answer = operator.post(Policy, "change", {**form, "version": 1}, policy.pk)

    assert answer.status_code == 302
    policy.refresh_from_db()
    assert (policy.model, policy.context_tokens, policy.version) == ("other", 4096, 4)


def test_what_ids_mean_is_not_edited_while_rollouts_sample(operator) -> None:
    policy = make_rollout().experiment.policy
    form = {
        "model": "other",
        "tokenizer": "/other",
        "context_tokens": 4096,
        "servers-TOTAL_FORMS": 0,
        "servers-INITIAL_FORMS": 0,
        "updates-TOTAL_FORMS": 0,
        "updates-INITIAL_FORMS": 0,
    }

    answer = operator.post(Policy, "change", form, policy.pk)

    before = (policy.model, policy.tokenizer)
    policy.refresh_from_db()
    assert answer.status_code == 302
    assert (policy.model, policy.tokenizer, policy.context_tokens) == (*before, 4096)


def test_pause_and_resume_tell_what_they_did(operator) -> None:
    active, paused = make_experiment(), make_experiment(state="paused")

    assert operator.act(Experiment, "pause", active, paused) == (
        f"Pause: 1 done, 1 skipped, 0 failed. {paused}: It is paused already."
    )
    assert operator.act(Experiment, "resume", active) == "Resume: 1 done, 0 skipped, 0 failed."
    active.refresh_from_db()
    paused.refresh_from_db()
    assert (active.state, paused.state) == ("active", "paused")


def test_stop_cancels_what_is_unfinished_and_a_stopped_one_cannot_resume(operator) -> None:
    group = make_group(samples=2)
    experiment = group.experiment
    done = end(group.rollouts.get(sample=0), "scored", reward=0.5)

    said = operator.act(Experiment, "stop", experiment)

    assert said == "Stop: 1 done, 0 skipped, 0 failed."
    experiment.refresh_from_db()
    assert experiment.state == "stopped"
    done.refresh_from_db()
    assert (done.outcome, done.reward) == ("scored", 0.5)
    assert group.rollouts.get(sample=1).outcome == "cancelled"
    assert operator.act(Experiment, "resume", experiment) == (
        f"Resume: 0 done, 1 skipped, 0 failed. {experiment}: The experiment was stopped; "
        f"create a new one."
    )
    assert operator.act(Experiment, "stop", experiment) == (
        f"Stop: 0 done, 1 skipped, 0 failed. {experiment}: It is stopped already."
    )


def test_an_experiment_with_rollouts_cannot_be_deleted_and_an_empty_one_can(operator) -> None:
    rollout, empty = make_rollout(), make_experiment()

    operator.post(Experiment, "delete", {"post": "yes"}, rollout.experiment_id)
    operator.post(Experiment, "delete", {"post": "yes"}, empty.pk)

    assert Rollout.objects.filter(pk=rollout.pk).exists()
    assert not Experiment.objects.filter(pk=empty.pk).exists()


def test_the_page_links_to_the_experiments_rollouts_alone(operator) -> None:
    rollout, other = make_rollout(), make_rollout()
    page = operator.get(Experiment, "change", rollout.experiment_id).content.decode()
    link = f"/admin/rollouts/rollout/?experiment__id__exact={rollout.experiment_id}"

    assert f'href="{link}"' in page
    assert "1 queued, 0 init, 0 run, 0 eval, 0 done" in page
    shown = operator.client.get(link)
    assert list(shown.context["cl"].queryset) == [rollout]
    assert str(other.pk) not in shown.content.decode()


def test_cancelling_groups_skips_those_that_are_not_open(operator) -> None:
    open_group, ready = make_group(samples=2), make_group(samples=1)
    end(ready.rollouts.get(), "scored")

    said = operator.act(Group, "cancel", open_group, ready)

    assert said == (f"Cancel: 1 done, 1 skipped, 0 failed. {ready}: The group is ready, not open.")
    assert set(open_group.rollouts.values_list("outcome", flat=True)) == {"cancelled"}
    assert ready.rollouts.get().outcome == "scored"


def test_hostile_names_are_inert(operator) -> None:
    experiment = make_experiment(name="<script>alert(1)</script>")

    page = operator.get(Experiment).content.decode()
    said = operator.act(Experiment, "pause", experiment)

    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    operator.act(Experiment, "pause", experiment)
    assert "<script>alert(1)" not in operator.get(Experiment).content.decode()
    assert said == "Pause: 1 done, 0 skipped, 0 failed."
