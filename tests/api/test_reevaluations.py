"""Scorings of rollouts and re-evaluations over HTTP."""

import gzip
import json
from typing import Any
from uuid import uuid4

import pytest

from evaluators.base import Artefacts
from rollouts.models import Evaluation, Experiment, Reevaluation, Rollout
from rollouts.services.artefacts import store_artefacts
from rollouts.services.reevaluations import Rescored, write_rescored
from tests import factories
from tests.api.callers import Caller, assert_problem
from tests.script_left import script_left


@pytest.fixture
def experiment(trainer: Caller) -> Experiment:
    return factories.make_experiment(owner=trainer.user)


@pytest.fixture
def rollout(experiment: Experiment) -> Rollout:
    """Return a scored rollout with what its evaluator was given."""
    made = factories.make_scored_rollout(group=factories.make_group(experiment=experiment))
    stored = store_artefacts(
        rollout=made, name="x", artefacts=Artefacts(phases=(script_left(b"1"),))
    )
    Evaluation.objects.create(
        rollout=made, evaluator="script", reward=1.0, log="ran", **stored.columns()
    )
    return made


def begin(trainer: Caller, experiment: Experiment, **body: Any) -> Any:
    return trainer.call("POST", f"experiments/{experiment.pk}/reevaluations/", body)


def test_a_rollouts_scorings_are_listed_with_what_was_kept(
    trainer: Caller, rollout: Rollout
) -> None:
    found = trainer.call("GET", f"rollouts/{rollout.pk}/evaluations/").json()

    (shown,) = found
    own = Evaluation.objects.get()
    assert {name: shown[name] for name in ("id", "source", "reward", "log", "code")} == {
        "id": str(own.pk),
        "source": "rollout",
        "reward": 1.0,
        "log": "ran",
        "code": None,
    }
    assert shown["evidence"] == {
        "size_bytes": own.evidence_size_bytes,
        "sha256": own.evidence_sha256,
    }


def test_what_was_kept_is_downloaded(trainer: Caller, rollout: Rollout) -> None:
    own = Evaluation.objects.get()

    answer = trainer.call("GET", f"rollouts/{rollout.pk}/evaluations/{own.pk}/evidence/")

    assert answer["Content-Type"] == "application/gzip"
    body = json.loads(gzip.decompress(answer.content))
    assert [phase["name"] for phase in body["artefacts"]["phases"]] == ["tests"]
    Evaluation.objects.update(evidence_path="")
    answer = trainer.call("GET", f"rollouts/{rollout.pk}/evaluations/{own.pk}/evidence/")
    assert_problem(answer, 404, "evidence.none")


def test_a_reevaluation_begins_and_tells_what_it_found(
    operator: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    settings = {"casefold": True}

    answer = begin(operator, experiment, evaluator="exact", evaluator_settings=settings)

    assert answer.status_code == 202, answer.content
    job = Reevaluation.objects.get()
    assert answer.json()["id"] == str(job.pk)
    found = Rescored(evaluator="exact", evaluator_version="1", settings_digest="", reward=0.25)
    write_rescored(job=job, rollout_id=rollout.pk, found=found)
    shown = operator.call("GET", f"reevaluations/{job.pk}/").json()
    assert (shown["evaluator"], shown["evaluator_settings"]) == ("exact", settings)
    assert (shown["state"], shown["environment"]) == ("queued", None)
    assert shown["report"] == {
        "total": 1,
        "done": 1,
        "scored": 1,
        "faults": {},
        "mean_before": 1.0,
        "mean_after": 0.25,
        "agreement": 0.0,
        "changed_count": 1,
        "changed": [
            {
                "rollout": str(rollout.pk),
                "task_ref": rollout.group.task.ref,
                "before": 1.0,
                "after": 0.25,
            }
        ],
    }
    listed = operator.call("GET", f"experiments/{experiment.pk}/reevaluations/").json()
    assert [each["id"] for each in listed["results"]] == [str(job.pk)]
    both = operator.call("GET", f"rollouts/{rollout.pk}/evaluations/").json()
    assert [each["source"] for each in both] == ["rollout", "reevaluation"]


def test_an_environments_evaluator_can_be_named(
    trainer: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    environment = factories.make_environment(evaluator="exact", version=3)

    answer = begin(trainer, experiment, environment=environment.ref)

    assert answer.status_code == 202, answer.content
    assert (answer.json()["environment"], answer.json()["evaluator"]) == (environment.ref, "exact")


@pytest.mark.parametrize(
    "own",
    [
        {"evaluator": "judge", "evaluator_settings": {"url": "http://mine/v1", "model": "m"}},
        {"environment": "answers@1", "evaluator_settings": {"source": "answer"}},
    ],
)
def test_an_evaluator_of_ones_own_is_for_operators(
    own: dict[str, Any], trainer: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    factories.make_environment(name="answers", evaluator="exact")

    problem = assert_problem(begin(trainer, experiment, **own), 403, "auth.forbidden")

    assert "name an environment whose evaluator is meant" in problem["detail"]
    assert not Reevaluation.objects.exists()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "request.invalid"),
        ({"evaluator": "exact", "environment": "x"}, 400, "environment.unknown"),
        ({"environment": "nowhere@1"}, 400, "environment.unknown"),
        ({"environment": "nowhere@"}, 400, "reference.unknown"),
        ({"environment": "nowhere@99999999999999"}, 400, "reference.unknown"),
        ({"evaluator": "vibes"}, 400, "evaluator.unknown"),
        ({"evaluator": "exact", "evaluator_settings": {"x": 1}}, 400, "evaluator.settings_invalid"),
    ],
)
def test_what_cannot_be_is_refused(
    body: dict[str, Any],
    status: int,
    code: str,
    operator: Caller,
    experiment: Experiment,
    rollout: Rollout,
) -> None:
    answer = begin(operator, experiment, **body)

    assert_problem(answer, status, code)
    assert not Reevaluation.objects.exists()


@pytest.mark.parametrize(
    "body", [{"evaluator": 7, "x": 1}, {"evaluator": "exact", "evaluator_settings": [1]}]
)
def test_malformed_bodies_are_refused(
    body: dict[str, Any], operator: Caller, experiment: Experiment
) -> None:
    assert begin(operator, experiment, **body).status_code == 400
    assert not Reevaluation.objects.exists()


def test_a_repeated_call_begins_one(
    operator: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    path, body = f"experiments/{experiment.pk}/reevaluations/", {"evaluator": "exact"}

    answers = [operator.call("POST", path, body, Idempotency_Key="again") for _ in range(2)]

    assert answers[0].json() == answers[1].json()
    assert Reevaluation.objects.count() == 1


def test_a_reevaluation_is_cancelled_once(
    operator: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    job = begin(operator, experiment, evaluator="exact").json()["id"]

    answer = operator.call("POST", f"reevaluations/{job}/cancel/")

    assert (answer.status_code, answer.json()["state"]) == (202, "cancelled")
    assert_problem(operator.call("POST", f"reevaluations/{job}/cancel/"), 409, "reevaluation.over")


def test_others_see_nothing(
    operator: Caller, stranger: Caller, experiment: Experiment, rollout: Rollout
) -> None:
    job = begin(operator, experiment, evaluator="exact").json()["id"]
    own = Evaluation.objects.get()
    for method, path in (
        ("GET", f"rollouts/{rollout.pk}/evaluations/"),
        ("GET", f"rollouts/{rollout.pk}/evaluations/{own.pk}/evidence/"),
        ("GET", f"rollouts/{uuid4()}/evaluations/"),
        ("GET", f"experiments/{experiment.pk}/reevaluations/"),
        ("GET", f"reevaluations/{job}/"),
        ("POST", f"reevaluations/{job}/cancel/"),
    ):
        assert_problem(stranger.call(method, path), 404, "not_found")
    answer = stranger.call(
        "POST", f"experiments/{experiment.pk}/reevaluations/", {"evaluator": "exact"}
    )
    assert_problem(answer, 404, "not_found")
    assert Reevaluation.objects.get().cancel_requested_at is None
