"""Environments as files, their versions compared, and their verifications over HTTP."""

from typing import Any
from uuid import uuid4

import pytest

from rollouts.models import Experiment, Verification
from rollouts.services.end import end_rollout
from rollouts.services.verifications import advance_verifications
from sandboxes.models import Environment, Image
from tests import factories
from tests.api.callers import Caller, assert_problem

ANSWERED = {"evaluator": "exact", "evaluator_payload": {"answer": "hello"}}
TOML = 'name = "sums"\nagent = "single_turn"\nevaluator = "exact"\nsystem_prompt = "{}"\n'


def make_environment() -> Environment:
    environment = factories.make_environment(image=None, evaluator="exact")
    factories.make_task(environment=environment, hidden=ANSWERED)
    return environment


def path_of(environment: Environment, call: str) -> str:
    return f"environments/{environment.pk}/{call}/"


def test_an_environment_is_exported_and_imported_as_it_is(
    trainer: Caller, operator: Caller
) -> None:
    image = factories.make_image()
    environment = factories.make_environment(image=image, setup="one\ntwo\n", agent="command_line")

    answer = trainer.call("GET", path_of(environment, "export"))

    assert (answer.status_code, answer["Content-Type"]) == (200, "application/toml; charset=utf-8")
    text = answer.content.decode()
    assert "setup = '''\none\ntwo\n'''" in text
    again = operator.call("POST", "environments/import/", {"toml": text})
    assert (again.status_code, again.json()["id"]) == (201, str(environment.pk))


def test_an_import_makes_the_next_version_once_for_a_key(operator: Caller) -> None:
    first = operator.call("POST", "environments/import/", {"toml": TOML.format("a")})
    body = {"toml": TOML.format("b")}
    answers = [
        operator.call("POST", "environments/import/", body, Idempotency_Key="once") for _ in "12"
    ]

    assert first.json()["ref"] == "sums@1"
    assert [each.json()["ref"] for each in answers] == ["sums@2", "sums@2"]
    assert answers[1]["Idempotency-Replayed"] == "true"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "request.invalid"),
        ({"toml": 3.5, "more": 1}, "request.invalid"),
        ({"toml": "name ="}, "environment.invalid_file"),
        ({"toml": TOML.format("") + "colour = 1"}, "environment.invalid_file"),
    ],
)
def test_an_import_refuses(operator: Caller, body: Any, code: str) -> None:
    assert_problem(operator.call("POST", "environments/import/", body), 400, code)
    assert Environment.objects.count() == Image.objects.count() == 0


def test_an_import_is_for_operators(trainer: Caller) -> None:
    answer = trainer.call("POST", "environments/import/", {"toml": TOML.format("")})

    assert_problem(answer, 403, "auth.forbidden")
    assert Environment.objects.count() == 0


def test_versions_are_compared(trainer: Caller) -> None:
    name = factories.unique("e")
    one, two, three = (
        factories.make_environment(name=name, version=version, setup=setup)
        for version, setup in ((1, "a"), (2, "a\n<script>alert(1)</script>"), (3, "c"))
    )

    answer = trainer.call("GET", path_of(two, "diff"))

    assert answer.json() == {
        "before": one.ref,
        "after": two.ref,
        "differences": [
            {
                "name": "setup",
                "lines": [
                    {"kind": "place", "text": "@@ -1 +1,2 @@"},
                    {"kind": "same", "text": "a"},
                    {"kind": "added", "text": "<script>alert(1)</script>"},
                ],
            }
        ],
    }
    against = trainer.call("GET", f"{path_of(one, 'diff')}?against={three.pk}").json()
    assert (against["before"], against["after"]) == (three.ref, one.ref)
    assert trainer.call("GET", path_of(one, "diff")).json()["differences"] == []
    for query in (f"against={uuid4()}", "against=x", "with=x"):
        assert_problem(
            trainer.call("GET", f"{path_of(one, 'diff')}?{query}"), 400, "request.invalid"
        )


def test_files_and_secrets_are_given_and_shown_without_contents(
    trainer: Caller, operator: Caller
) -> None:
    given = {
        "name": "full",
        "files": {"bin/x": {"base64": "aGk=", "mode": 0o755}},
        "secrets": {"TOKEN": {"from": "env:TOKEN", "to": ["tools"]}},
    }

    made = operator.call("POST", "environments/", given)

    assert made.status_code == 201
    shown = trainer.call("GET", f"environments/{made.json()['id']}/").json()
    assert shown["files"] == {"bin/x": {"bytes": 2, "mode": 0o755}}
    assert shown["secrets"] == given["secrets"]
    assert (shown["verification"], shown["verified_at"]) == ("unverified", None)
    assert Environment.objects.get().files == given["files"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"files": {"../x": {"base64": "", "mode": 0}}}, "files"),
        ({"files": []}, "files"),
        ({"secrets": {"T": {"from": "hunter2", "to": ["tools"]}}}, "secrets"),
        ({"secrets": "env:T"}, "secrets"),
        ({"verification": "verified"}, "verification"),
    ],
)
def test_wrong_files_and_secrets_are_refused(
    operator: Caller, change: dict[str, Any], field: str
) -> None:
    answer = operator.call("POST", "environments/", {"name": "e", **change})

    assert list(assert_problem(answer, 400, "request.invalid")["errors"]) == [field]
    assert b"hunter2" not in answer.content
    assert Environment.objects.count() == 0


def test_a_verification_is_begun_followed_and_read(trainer: Caller, operator: Caller) -> None:
    environment = make_environment()

    begun = operator.call("POST", path_of(environment, "verifications"), {"repeats": 1, "seed": 7})

    assert begun.status_code == 202
    body = begun.json()
    assert (body["state"], body["verdict"], body["seed"]) == ("running", "", 7)
    assert (body["environment_ref"], body["requested_by"]) == (
        environment.ref,
        operator.user.username,
    )
    path = f"verifications/{body['id']}/"
    running = operator.call("GET", path).json()
    assert (running["rollouts_done"], running["rollouts"], running["report"]) == (0, 2, {})
    verification = Verification.objects.get()
    for rollout in verification.experiment.rollouts.select_related("group"):
        reward = float(rollout.group.metadata["verification"] == "oracle")
        assert end_rollout(rollout_id=rollout.pk, outcome="scored", reward=reward)
    assert advance_verifications() == 1

    ended = operator.call("GET", path).json()
    assert (ended["state"], ended["verdict"], ended["rollouts_done"]) == ("done", "verified", 2)
    assert ended["report"]["counts"] == {"passed": 1}
    listed = operator.call("GET", path_of(environment, "verifications")).json()["results"]
    assert [each["id"] for each in listed] == [body["id"]]
    assert "report" not in listed[0]
    assert operator.call("GET", "verifications/").json()["results"] == listed
    shown = trainer.call("GET", "environments/?verification=verified").json()["results"]
    assert [each["id"] for each in shown] == [str(environment.pk)]
    assert trainer.call("GET", "environments/?verification=broken").json()["results"] == []


def test_tasks_may_come_from_a_set(operator: Caller) -> None:
    environment = factories.make_environment(image=None, evaluator="exact")
    task_set = factories.make_task(hidden=ANSWERED).task_set
    path = path_of(environment, "verifications")

    assert_problem(operator.call("POST", path, {}), 400, "verification.no_tasks")
    for given in (task_set.name, str(task_set.pk)):
        begun = operator.call("POST", path, {"task_set": given})
        assert (begun.status_code, begun.json()["task_set"]) == (202, task_set.name)
        operator.call("POST", f"verifications/{begun.json()['id']}/cancel/")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tasks": 0}, "tasks"),
        ({"repeats": 6}, "repeats"),
        ({"tolerance": 2}, "tolerance"),
        ({"task_set": "nothing"}, "task_set"),
        ({"deadline_seconds": 1}, "deadline_seconds"),
        ({"budgets": {"x": 1}}, "budgets"),
        ({"force": True}, "force"),
    ],
)
def test_a_verification_refuses(operator: Caller, body: dict[str, Any], field: str) -> None:
    answer = operator.call("POST", path_of(make_environment(), "verifications"), body)

    assert list(assert_problem(answer, 400, "request.invalid")["errors"]) == [field]
    assert Experiment.objects.count() == 0


def test_a_verification_is_for_operators(trainer: Caller, operator: Caller) -> None:
    environment = make_environment()
    path = path_of(environment, "verifications")

    assert_problem(trainer.call("POST", path, {}), 403, "auth.forbidden")
    assert_problem(trainer.call("GET", path), 403, "auth.forbidden")
    assert Verification.objects.count() == 0
    begun = operator.call("POST", path, {}).json()["id"]
    assert_problem(trainer.call("GET", f"verifications/{begun}/"), 403, "auth.forbidden")
    assert_problem(trainer.call("POST", f"verifications/{begun}/cancel/"), 403, "auth.forbidden")
    assert Verification.objects.get().state == "running"
    missing = f"environments/{uuid4()}/verifications/"
    assert_problem(operator.call("POST", missing, {}), 404, "not_found")


def test_a_second_one_waits_and_the_first_can_be_cancelled(operator: Caller) -> None:
    path = path_of(make_environment(), "verifications")
    begun = operator.call("POST", path, {}).json()["id"]

    assert_problem(operator.call("POST", path, {}), 409, "verification.running")
    cancelled = operator.call("POST", f"verifications/{begun}/cancel/")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert_problem(
        operator.call("POST", f"verifications/{begun}/cancel/"), 409, "verification.ended"
    )
    assert operator.call("POST", path, {}).status_code == 202


def test_its_experiment_is_shown_to_nobody(operator: Caller) -> None:
    operator.call("POST", path_of(make_environment(), "verifications"), {})
    experiment = Experiment.objects.get()

    assert operator.call("GET", "experiments/").json()["results"] == []
    for method, call in (("GET", ""), ("POST", "batches/"), ("GET", "metrics/"), ("POST", "stop/")):
        answer = operator.call(method, f"experiments/{experiment.pk}/{call}", {"groups": 1})
        assert_problem(answer, 404, "not_found")
    assert str(experiment.pk) not in operator.call("GET", "/metrics").content.decode()
    (first, *_) = operator.call("GET", "rollouts/").json()["results"]
    assert operator.call("GET", f"rollouts/{first['id']}/").status_code == 200


def test_an_experiment_on_what_is_broken_must_be_forced(trainer: Caller) -> None:
    task = factories.make_task(environment=factories.make_environment(verification="broken"))
    policy = factories.make_policy()
    body = {"name": "e", "policy": policy.name, "task_sets": [task.task_set.name]}

    for path in ("experiments/", "evaluations/"):
        problem = assert_problem(trainer.call("POST", path, body), 409, "environment.broken")
        assert '"force": true' in problem["detail"]
    assert Experiment.objects.count() == 0

    made = trainer.call("POST", "experiments/", {**body, "force": True})
    assert (made.status_code, made.json()["force"]) == (201, True)
    assert trainer.call("POST", "evaluations/", {**body, "force": True}).status_code == 202


def test_a_group_of_what_is_broken_needs_the_experiment_to_be_forced(trainer: Caller) -> None:
    task = factories.make_task(environment=factories.make_environment(verification="broken"))
    experiment = factories.make_experiment(owner=trainer.user)
    path = f"experiments/{experiment.pk}/"
    body = {"groups": [{"task": str(task.pk)}]}

    assert_problem(trainer.call("POST", f"{path}groups/", body), 409, "environment.broken")
    changed = trainer.call("PATCH", path, {"force": True}).json()
    assert (changed["force"], changed["takes_effect"]) == (
        True,
        {"force": "groups not yet submitted"},
    )
    assert trainer.call("POST", f"{path}groups/", body).status_code == 202


def test_flaky_tasks_are_shown_and_filtered(trainer: Caller) -> None:
    task_set = factories.make_task_set()
    flaky, steady = (
        factories.make_task(task_set=task_set, content_hash=each, flaky_hash=marked)
        for each, marked in (("a", "a"), ("b", "a"))
    )
    path = f"task-sets/{task_set.pk}/tasks/"

    def found(query: str) -> list[tuple[str, bool]]:
        rows = trainer.call("GET", f"{path}{query}").json()["results"]
        return sorted((each["ref"], each["flaky"]) for each in rows)

    assert found("") == sorted([(flaky.ref, True), (steady.ref, False)])
    assert found("?flaky=true") == [(flaky.ref, True)]
    assert found("?flaky=false") == [(steady.ref, False)]
