"""Evaluation runs over HTTP."""

from typing import Any

from rollouts.models import EvaluationRun, Experiment, Rollout
from rollouts.services.end import end_rollout
from tests import factories
from tests.api.callers import Caller, assert_problem
from tests.services.feeding import make_tasks


def begin(trainer: Caller, **changes: Any) -> Any:
    given = {"name": "run", "task_sets": ["maths"], "samples_per_task": 2, **changes}
    if "policy" not in given:
        given["policy"] = factories.make_policy().name
    return trainer.call("POST", "evaluations/", given)


def score(evaluation: dict[str, Any], rewards: list[float]) -> None:
    rollouts = Rollout.objects.filter(experiment=evaluation["experiment"])
    ordered = rollouts.order_by("group__task__ref", "sample")
    for rollout, reward in zip(ordered, rewards, strict=True):
        assert end_rollout(rollout_id=rollout.pk, outcome="scored", reward=reward)


def test_a_run_from_its_beginning_to_its_end(trainer: Caller) -> None:
    make_tasks(2, name="maths")
    policy = factories.make_policy()

    response = begin(trainer, policy=policy.name, seed=7, sampling={"temperature": 0.5})

    assert response.status_code == 202, response.content
    row = EvaluationRun.objects.get()
    made = {
        "id": str(row.pk),
        "name": "run",
        "experiment": str(row.experiment_id),
        "policy": policy.name,
        "policy_version": 3,
        "task_sets": ["maths"],
        "samples_per_task": 2,
        "seed": 7,
        "key": "reward",
        "threshold": 1.0,
        "created_at": row.created_at.isoformat().replace("+00:00", "Z"),
    }
    assert response.json() == made
    assert (row.owner, row.experiment.owner) == (trainer.user, trainer.user)
    assert row.experiment.sampling["temperature"] == 0.5
    assert trainer.call("GET", "evaluations/").json()["results"] == [made]
    score(made, [1.0, 0.0, 1.0, 1.0])

    body = trainer.call("GET", f"evaluations/{row.pk}/").json()

    assert {name: body[name] for name in made} == made
    assert (body["state"], body["first_version"], body["last_version"]) == ("done", None, None)
    assert body["overall"] == body["by_task_set"]["maths"]
    overall = body["overall"]
    assert {name: overall[name] for name in overall if name not in ("pass_at", "mean_reward")} == {
        "tasks": 2,
        "samples": 4,
        "done": 4,
        "scored": 4,
        "nulls": 0,
        "right": 3,
    }
    assert list(overall["pass_at"]) == ["1", "2"]
    one = overall["pass_at"]["1"]
    assert (one["value"], one["tasks"], one["low"] < 0.75 < one["high"]) == (0.75, 2, True)
    assert overall["mean_reward"]["value"] == 0.75
    assert body["intervals"].startswith("95 % over tasks: pass@k by Wilson's score")


def test_two_versions_are_compared(trainer: Caller) -> None:
    make_tasks(2, name="maths")
    old, new = begin(trainer).json(), begin(trainer).json()
    score(old, [0.0, 0.0, 1.0, 1.0])
    score(new, [1.0, 0.0, 1.0, 1.0])

    body = trainer.call("GET", f"evaluations/{new['id']}/compare/?with={old['id']}").json()

    assert (body["run"], body["other"], body["complete"]) == (new["id"], old["id"], True)
    assert (body["tasks"], body["left_out"]) == (2, 0)
    assert (body["wins"], body["losses"], body["ties"], body["p_value"]) == (1, 0, 1, 1.0)
    assert body["run_pass_at_1"]["value"] - body["other_pass_at_1"]["value"] == 0.25
    assert body["difference"]["value"] == 0.25
    assert body["difference"]["low"] < 0.25 < body["difference"]["high"]


def test_what_is_wrong_is_said(trainer: Caller) -> None:
    make_tasks(1, name="maths")
    factories.make_task_set(name="empty")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"task_sets": []}, "request.invalid"),
        ({"task_sets": ["empty"]}, "request.invalid"),
        ({"task_sets": ["nothing"]}, "request.invalid"),
        ({"samples_per_task": 0}, "request.invalid"),
        ({"seed": -1}, "request.invalid"),
        ({"sampling": {"seed": 9}}, "request.invalid"),
        ({"threshold": "high"}, "request.invalid"),
        ({"policy": "nobody"}, "request.invalid"),
        ({"experiment": "mine"}, "request.invalid"),
    ]
    for changes, code in cases:
        assert_problem(begin(trainer, **changes), 400, code)
    assert (EvaluationRun.objects.count(), Experiment.objects.count()) == (0, 0)


def test_a_run_without_values_has_no_numbers_and_cannot_be_compared(trainer: Caller) -> None:
    make_tasks(1, name="maths")
    run = begin(trainer).json()

    body = trainer.call("GET", f"evaluations/{run['id']}/").json()
    path = f"evaluations/{run['id']}/compare/"

    assert body["state"] == "running"
    assert body["overall"]["pass_at"]["1"] == {"value": None, "low": None, "high": None, "tasks": 0}
    assert_problem(trainer.call("GET", f"{path}?with={run['id']}"), 400, "evaluation.incomparable")
    for other in ("", "?with=", "?with=x", f"?with={run['experiment']}"):
        assert_problem(trainer.call("GET", f"{path}{other}"), 400, "evaluation.unknown")


def test_a_run_is_its_owners_alone(trainer: Caller, stranger: Caller) -> None:
    make_tasks(1, name="maths")
    run = begin(trainer).json()
    own = begin(stranger).json()

    assert stranger.call("GET", f"evaluations/{run['id']}/").status_code == 404
    assert [each["id"] for each in stranger.call("GET", "evaluations/").json()["results"]] == [
        own["id"]
    ]
    assert_problem(
        stranger.call("GET", f"evaluations/{own['id']}/compare/?with={run['id']}"),
        400,
        "evaluation.unknown",
    )


def test_a_bound_token_begins_none(make_caller: Any, trainer: Caller) -> None:
    make_tasks(1, name="maths")
    experiment = factories.make_experiment(owner=trainer.user)
    bound = make_caller(trainer.user, experiments=[experiment])

    assert_problem(begin(bound), 403, "auth.bound_token")
    assert EvaluationRun.objects.count() == 0


def test_the_same_key_begins_one_run(trainer: Caller) -> None:
    make_tasks(1, name="maths")
    given = {"name": "run", "policy": factories.make_policy().name, "task_sets": ["maths"]}

    first, again = (
        trainer.call("POST", "evaluations/", given, Idempotency_Key="one") for _ in range(2)
    )

    assert first.json() == again.json()
    assert (EvaluationRun.objects.count(), Rollout.objects.count()) == (1, 1)
