"""Re-evaluations: another evaluator scores what was kept; the rollouts' own rewards stay."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db.models import F
from django.db.models.functions import Now

from evaluators import runner
from evaluators.base import Artefacts
from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import Evaluation, Experiment, Reevaluation, Rollout, Task
from rollouts.services.artefacts import store_artefacts
from rollouts.services.reevaluation_report import report_reevaluation
from rollouts.services.reevaluations import (
    MAX_OPEN,
    Rescored,
    begin_reevaluation,
    cancel_reevaluation,
    give_reevaluation_back,
    keep_reevaluation,
    publish_open_reevaluations,
    take_reevaluation,
    write_rescored,
)
from rollouts.stages import reevaluating
from rollouts.stages.reevaluating import carry_on
from tests import factories
from tests.script_left import script_left

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def storage(settings: Any, tmp_path: Path) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores


@pytest.fixture(autouse=True)
def _one_slice_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reevaluating, "SLICE_SECONDS", 600.0)


@pytest.fixture
def experiment() -> Experiment:
    """Return an experiment with rollouts that answered hello, Hello and bye; only one was right."""
    made = factories.make_experiment()
    group = factories.make_group(experiment=made)
    for answer in ("hello", "Hello", "bye"):
        reward = float(answer == "hello")
        rollout = factories.make_scored_rollout(group=group, answer=answer, reward=reward)
        Evaluation.objects.create(rollout=rollout, evaluator="exact", reward=reward)
    factories.make_rollout(group=group)
    return made


def begin(experiment: Experiment, **values: Any) -> Reevaluation:
    return begin_reevaluation(owner=experiment.owner, experiment=experiment, **values)


def keep_script(experiment: Experiment, reward: bytes) -> None:
    """Have every rollout's own evaluation keep what a test script left."""
    for rollout in Rollout.objects.scored():
        stored = store_artefacts(
            rollout=rollout,
            name="kept",
            artefacts=Artefacts(phases=(script_left(reward),)),
        )
        Evaluation.objects.filter(rollout=rollout).update(**stored.columns())


def again(job: Reevaluation) -> dict[str | None, tuple[float | None, str]]:
    """Return reward and code of each rollout of a job, by its answer."""
    rows = Evaluation.objects.filter(reevaluation=job).select_related("rollout")
    return {row.rollout.answer: (row.reward, row.code) for row in rows}


def test_every_scored_rollout_is_scored_again_and_keeps_its_own_reward(
    experiment: Experiment,
) -> None:
    job = begin(experiment, evaluator="exact", evaluator_settings={"casefold": True})

    assert carry_on(job.pk) == 3

    job.refresh_from_db()
    assert (job.state, job.lease_token) == ("done", None)
    assert job.ended_at is not None
    assert again(job) == {"hello": (1.0, ""), "Hello": (1.0, ""), "bye": (0.0, "")}
    assert list(Rollout.objects.scored().order_by("sample").values_list("reward", flat=True)) == [
        1.0,
        0.0,
        0.0,
    ]
    assert Evaluation.objects.filter(source="rollout", reevaluation=None).count() == 3
    report = report_reevaluation(job=job)
    assert (report.total, report.done, report.scored, report.faults) == (3, 3, 3, {})
    assert report.mean_before == pytest.approx(1 / 3)
    assert report.mean_after == report.agreement == pytest.approx(2 / 3)
    assert report.changed_count == 1
    changed = Rollout.objects.get(answer="Hello")
    (row,) = report.changed
    assert (row.rollout, row.task_ref, row.before, row.after) == (
        changed.pk,
        changed.group.task.ref,
        0.0,
        1.0,
    )


def test_the_sandboxes_that_were_kept_are_judged_by_other_settings(experiment: Experiment) -> None:
    keep_script(experiment, b'{"reward": 0.5, "style": 0.25}')
    job = begin(experiment, evaluator="script", evaluator_settings={"key": "style"})

    carry_on(job.pk)

    assert set(again(job).values()) == {(0.25, "")}
    versions = Evaluation.objects.filter(reevaluation=job).values_list(
        "evaluator_version", flat=True
    )
    assert set(versions) == {"1"}


def test_what_was_not_kept_is_said_with_what_to_do(experiment: Experiment) -> None:
    job = begin(experiment, evaluator="script")

    carry_on(job.pk)

    assert set(again(job).values()) == {(None, "reevaluation.artefacts_missing")}
    for row in Evaluation.objects.filter(reevaluation=job):
        assert "Take new rollouts" in row.details["message"]
    report = report_reevaluation(job=job)
    assert report.faults == {"reevaluation.artefacts_missing": 3}
    assert (report.scored, report.agreement, report.mean_before) == (0, None, None)


def test_a_sandbox_of_another_name_is_missing(experiment: Experiment) -> None:
    keep_script(experiment, b"1")
    for each in Evaluation.objects.all():
        other = Artefacts(phases=(script_left(b"1"),))
        renamed = other.phases[0].__class__(name="other", files={})
        stored = store_artefacts(
            rollout=each.rollout, name="other", artefacts=Artefacts(phases=(renamed,))
        )
        Evaluation.objects.filter(pk=each.pk).update(**stored.columns())
    job = begin(experiment, evaluator="script")

    carry_on(job.pk)

    assert set(again(job).values()) == {(None, "reevaluation.artefacts_missing")}


def test_an_environments_evaluator_is_taken_with_its_settings(experiment: Experiment) -> None:
    settings = {"pattern": "^b", "source": "answer"}
    environment = factories.make_environment(evaluator="regex", evaluator_settings=settings)
    Task.objects.update(hidden={})
    job = begin(experiment, environment=environment)

    carry_on(job.pk)

    assert again(job) == {"hello": (0.0, ""), "Hello": (0.0, ""), "bye": (1.0, "")}


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "request.invalid"),
        ({"evaluator": "vibes"}, "evaluator.unknown"),
        ({"evaluator": "exact", "evaluator_settings": {"x": 1}}, "evaluator.settings_invalid"),
        ({"evaluator": "regex"}, "evaluator.settings_invalid"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    values: dict[str, Any], code: str, experiment: Experiment
) -> None:
    with pytest.raises(InvalidValue) as raised:
        begin(experiment, **values)

    assert raised.value.code == code
    assert not Reevaluation.objects.exists()


def test_an_experiment_without_a_score_is_refused() -> None:
    with pytest.raises(InvalidValue) as raised:
        begin(factories.make_experiment(), evaluator="exact")

    assert raised.value.code == "reevaluation.empty"


def test_only_so_many_are_open_at_once(experiment: Experiment) -> None:
    for _count in range(MAX_OPEN):
        begin(experiment, evaluator="exact")

    with pytest.raises(StateConflict) as raised:
        begin(experiment, evaluator="exact")

    assert raised.value.code == "reevaluation.too_many"


def test_one_worker_holds_a_job_and_a_dead_one_loses_it(experiment: Experiment) -> None:
    job = begin(experiment, evaluator="exact")
    first = take_reevaluation(reevaluation_id=job.pk, item_seconds=5)
    assert first is not None

    assert take_reevaluation(reevaluation_id=job.pk, item_seconds=5) is None
    assert carry_on(job.pk) == 0
    Reevaluation.objects.update(lease_expires_at=Now() - timedelta(seconds=1))
    second = take_reevaluation(reevaluation_id=job.pk, item_seconds=5)

    assert second is not None
    assert not keep_reevaluation(holding=first, item_seconds=5)
    give_reevaluation_back(holding=first)
    assert keep_reevaluation(holding=second, item_seconds=5)
    give_reevaluation_back(holding=second)
    assert carry_on(job.pk) == 3


def test_a_rollout_is_written_once_whoever_comes(experiment: Experiment) -> None:
    job = begin(experiment, evaluator="exact")
    rollout = Rollout.objects.get(answer="bye")
    found = Rescored(evaluator="exact", evaluator_version="1", settings_digest="", reward=0.5)

    assert write_rescored(job=job, rollout_id=rollout.pk, found=found)
    assert not write_rescored(job=job, rollout_id=rollout.pk, found=found)

    assert carry_on(job.pk) == 2
    assert again(job)[rollout.answer] == (0.5, "")


def test_a_slice_ends_after_one_while_rollouts_wait_for_their_own_grading(
    experiment: Experiment,
) -> None:
    factories.make_attempt(stage="eval")
    job = begin(experiment, evaluator="exact")

    assert [carry_on(job.pk) for _slice in range(4)] == [1, 1, 1, 0]

    job.refresh_from_db()
    assert job.state == "done"


def test_a_cancelled_job_keeps_what_it_scored(experiment: Experiment) -> None:
    factories.make_attempt(stage="eval")
    job = begin(experiment, evaluator="exact")
    carry_on(job.pk)

    cancel_reevaluation(job=job)

    job.refresh_from_db()
    assert (job.state, carry_on(job.pk)) == ("cancelled", 0)
    assert Evaluation.objects.filter(reevaluation=job).count() == 1
    with pytest.raises(StateConflict):
        cancel_reevaluation(job=job)


def test_a_cancel_kills_the_scoring_under_way(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rollout.objects.update(answer="a" * 60 + "b")
    Task.objects.update(hidden={})
    job = begin(experiment, evaluator="regex", evaluator_settings={"pattern": r"(a+)+$"})
    monkeypatch.setattr(reevaluating, "CANCEL_POLL_SECONDS", 0.0)
    asked = runner._communicate

    def cancel_then(*arguments: Any) -> Any:
        cancel_reevaluation(job=job)
        return asked(*arguments)

    monkeypatch.setattr(runner, "_communicate", cancel_then)

    assert carry_on(job.pk) == 0

    job.refresh_from_db()
    assert job.state == "cancelled"
    assert not Evaluation.objects.filter(reevaluation=job).exists()


def test_an_evaluator_that_hangs_is_written_down_as_such(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rollout.objects.exclude(answer="bye").delete()
    Rollout.objects.update(answer="a" * 60 + "b")
    Task.objects.update(hidden={})
    monkeypatch.setattr(reevaluating, "ITEM_SECONDS", 0.5)
    job = begin(experiment, evaluator="regex", evaluator_settings={"pattern": r"(a+)+$"})

    assert carry_on(job.pk) == 1

    assert list(again(job).values()) == [(None, "evaluator.timeout")]


def test_jobs_that_nobody_holds_are_published_again(experiment: Experiment) -> None:
    job = begin(experiment, evaluator="exact")
    assert publish_open_reevaluations() == 1
    held = take_reevaluation(reevaluation_id=job.pk, item_seconds=5)
    assert publish_open_reevaluations() == 0
    Reevaluation.objects.update(lease_expires_at=F("lease_expires_at") - timedelta(hours=1))
    assert publish_open_reevaluations() == 1
    assert held is not None


def test_an_unknown_job_is_nothing() -> None:
    assert carry_on(uuid4()) == 0


def test_rollouts_that_were_cancelled_or_failed_are_left_alone(experiment: Experiment) -> None:
    make: Callable[..., Rollout] = factories.make_rollout
    group = Rollout.objects.get(answer="bye").group
    for outcome in ("infra_failed", "cancelled"):
        make(group=group, state="done", outcome=outcome, done_at=Now())
    job = begin(experiment, evaluator="exact")

    carry_on(job.pk)

    assert Evaluation.objects.filter(reevaluation=job).count() == 3
