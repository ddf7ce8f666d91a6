"""Verifications: what is started, what its rollouts show, and what follows for the catalogue."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, close_old_connections, transaction
from django.utils import timezone

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.importers.base import FileContent, encode_files
from rollouts.models import (
    Evaluation,
    Experiment,
    Group,
    Rollout,
    Task,
    Verification,
)
from rollouts.services import verification_report, verifications
from rollouts.services.end import end_rollout
from rollouts.services.evaluations import begin_evaluation
from rollouts.services.experiments import create_experiment, update_experiment
from rollouts.services.inline import InlineTask, add_inline_tasks
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.services.verification_report import spread
from rollouts.services.verifications import (
    advance_verifications,
    begin_verification,
    cancel_verification,
    done_of,
)
from sandboxes.models import Environment
from sandboxes.services.catalogue import save_environment
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

SOLUTION = encode_files({"solve.sh": FileContent(data=b"echo 42 > /app/out\n")})
ANSWERED = {"evaluator": "exact", "evaluator_payload": {"answer": ["hello", "hi"]}}
SCRIPTED = {"evaluator": "script", "solution": SOLUTION, "tests": SOLUTION}


def shell() -> Environment:
    return factories.make_environment(image=factories.make_image(), evaluator="script")


def scripted(environment: Environment, count: int = 1) -> list[Task]:
    task_set = factories.make_task_set()
    return [
        factories.make_task(task_set=task_set, environment=environment, hidden=SCRIPTED)
        for _ in range(count)
    ]


def begin(environment: Environment, **values: Any) -> Verification:
    return begin_verification(
        environment=environment, requested_by=factories.make_operator(), **values
    )


def rollouts_of(verification: Verification, role: str, task: Task | None = None) -> list[Rollout]:
    found = Rollout.objects.filter(
        experiment=verification.experiment_id, group__metadata__verification=role
    )
    if task is not None:
        found = found.filter(group__task=task)
    return list(found.order_by("sequence", "sample"))


def pay(rollout: Rollout, reward: float, log: str = "") -> None:
    Evaluation.objects.create(rollout=rollout, evaluator="script", reward=reward, log=log)
    assert end_rollout(rollout_id=rollout.pk, outcome="scored", reward=reward)


def fail(rollout: Rollout, code: str, detail: str = "", outcome: str = "infra_failed") -> None:
    assert end_rollout(
        rollout_id=rollout.pk, outcome=outcome, failure_code=code, failure_detail=detail
    )


def end(verification: Verification, *, oracle: float = 1.0, noop: float = 0.0) -> Verification:
    """End every rollout that has not ended, and then the verification."""
    for role, reward in (("oracle", oracle), ("noop", noop)):
        for rollout in rollouts_of(verification, role):
            if rollout.outcome is None:
                pay(rollout, reward)
    assert advance_verifications() == 1
    return now(verification)


def now(verification: Verification) -> Verification:
    return Verification.objects.select_related("environment").get(pk=verification.pk)


def test_each_task_is_solved_and_left_alone_some_times_over_the_line() -> None:
    environment = shell()
    tasks = scripted(environment, 2)

    verification = begin(environment, repeats=3)

    groups = Group.objects.filter(experiment=verification.experiment_id)
    found = [(each.task, each.size, each.metadata["verification"]) for each in groups]
    assert sorted(found, key=str) == sorted(
        [(task, 3, role) for task in tasks for role in ("oracle", "noop")], key=str
    )
    experiment = verification.experiment
    assert (experiment.purpose, experiment.policy_id, experiment.feed) == (
        "verification",
        None,
        "push",
    )
    assert set(Rollout.objects.values_list("needs_sandbox", "environment")) == {
        (True, environment.pk)
    }
    assert (verification.state, verification.verdict, verification.task_count) == ("running", "", 2)
    assert done_of(verification) == (0, 12)


def test_what_is_paid_in_full_and_not_for_nothing_is_verified() -> None:
    environment = shell()
    (task,) = scripted(environment)
    verification = begin(environment)
    for rollout in Rollout.objects.all():
        timings = {"init": 2.0 + rollout.sample, "run": 0.5, "eval": 1.0, "queue_run": 9.0}
        Rollout.objects.filter(pk=rollout.pk).update(timings=timings)

    ended = end(verification)

    assert (ended.state, ended.verdict, ended.environment.verification) == (
        "done",
        "verified",
        "verified",
    )
    assert ended.ended_at is not None
    assert ended.environment.verified_at is not None
    assert ended.report["environment"] == environment.ref
    assert ended.report["counts"] == {"passed": 1}
    assert ended.report["seconds"]["init"] == {"p50": 2.0, "p90": 3.0, "max": 3.0}
    (found,) = ended.report["tasks"]
    assert (found["task"], found["ref"], found["state"]) == (str(task.pk), task.ref, "passed")
    assert found["checks"] == dict.fromkeys(
        ("starts", "setup", "solution", "nothing", "repeats"), "passed"
    )
    assert found["rewards"] == {"oracle": [1.0, 1.0], "noop": [0.0, 0.0]}
    assert ended.experiment.state == "stopped"
    assert Task.objects.flaky().count() == 0


def test_a_later_version_begins_unverified() -> None:
    environment = shell()
    scripted(environment)
    end(begin(environment))

    later = save_environment(name=environment.name, image=environment.image, setup="true")

    assert (later.version, later.verification, later.verified_at) == (2, "unverified", None)


@pytest.mark.parametrize(
    ("oracle", "noop", "failing"),
    [(0.5, 0.0, "solution"), (1.0, 1.0, "nothing"), (0.0, 0.0, "solution")],
)
def test_a_wrong_reward_breaks_the_environment_and_tells_the_log(
    oracle: float, noop: float, failing: str
) -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    role = "oracle" if failing == "solution" else "noop"
    for rollout in rollouts_of(verification, role):
        pay(rollout, oracle if role == "oracle" else noop, log=f"{role} said no\n")

    ended = end(verification, oracle=oracle, noop=noop)

    assert (ended.verdict, ended.environment.verification) == ("broken", "broken")
    (found,) = ended.report["tasks"]
    assert [name for name, state in found["checks"].items() if state == "failed"] == [failing]
    assert (found["state"], found["log"]) == ("failed", f"{role} said no\n")


@pytest.mark.parametrize(
    ("code", "outcome", "failing"),
    [
        ("sandbox.image_build_failed", "infra_failed", "starts"),
        ("sandbox.start_timeout", "timed_out", "starts"),
        ("sandbox.setup_failed", "infra_failed", "setup"),
        ("secret.missing", "infra_failed", "setup"),
        ("evaluator.reward_missing", "infra_failed", "solution"),
        ("eval.timeout", "timed_out", "solution"),
    ],
)
def test_what_is_the_environments_own_fault_breaks_it(
    code: str, outcome: str, failing: str
) -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    for rollout in rollouts_of(verification, "oracle"):
        fail(rollout, code, "no such package\n", outcome)

    ended = end(verification)

    (found,) = ended.report["tasks"]
    assert (ended.verdict, found["state"], found["checks"][failing]) == (
        "broken",
        "failed",
        "failed",
    )
    assert found["detail"] == f"{code}: no such package\n"


@pytest.mark.parametrize("code", ["init.worker_lost", "node.no_workers", "dispatch.failed", ""])
def test_what_is_nobodys_fault_decides_nothing(code: str) -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    for rollout in rollouts_of(verification, "oracle"):
        fail(rollout, code)

    ended = end(verification)

    (found,) = ended.report["tasks"]
    assert (found["state"], found["checks"]["solution"]) == ("undecided", "undecided")
    assert (ended.verdict, ended.environment.verification) == ("undecided", "unverified")


def test_a_task_that_scores_differently_is_flaky_and_its_new_content_is_not() -> None:
    environment = shell()
    flaky, steady = scripted(environment, 2)
    verification = begin(environment, tolerance=0.5)
    for rollout, reward in zip(rollouts_of(verification, "oracle", flaky), (1.0, 0.0), strict=True):
        pay(rollout, reward)

    ended = end(verification)

    states = {each["ref"]: each["state"] for each in ended.report["tasks"]}
    assert states == {flaky.ref: "flaky", steady.ref: "passed"}
    assert ended.verdict == "verified"
    assert list(Task.objects.flaky()) == [flaky]
    assert list(Task.objects.steady()) == [steady]
    marked = Task.objects.get(pk=flaky.pk)
    assert marked.flaky is True
    assert marked.flaky_evidence == {
        "verification": str(verification.pk),
        "environment": str(environment.pk),
        "rewards": {"oracle": [1.0, 0.0], "noop": [0.0, 0.0]},
    }
    Task.objects.filter(pk=flaky.pk).update(content_hash="another")
    assert Task.objects.flaky().count() == 0


def test_a_task_that_was_changed_meanwhile_is_not_marked() -> None:
    environment = shell()
    (task,) = scripted(environment)
    verification = begin(environment)
    Task.objects.filter(pk=task.pk).update(content_hash="another")
    for rollout, reward in zip(rollouts_of(verification, "noop"), (1.0, 0.0), strict=True):
        pay(rollout, reward)

    end(verification)

    assert Task.objects.get(pk=task.pk).flaky_hash == ""


@pytest.mark.parametrize(
    ("tolerance", "verdict"), [(0.0, "broken"), (0.24, "broken"), (0.25, "verified")]
)
def test_some_tasks_may_fail(tolerance: float, verdict: str) -> None:
    environment = shell()
    tasks = scripted(environment, 4)
    verification = begin(environment, tolerance=tolerance)
    for rollout in rollouts_of(verification, "oracle", tasks[2]):
        pay(rollout, 0.0)

    ended = end(verification)

    assert ended.verdict == verdict
    assert ended.report["counts"] == {"failed": 1, "passed": 3}
    assert ended.report["tasks"][0]["ref"] == tasks[2].ref


def test_a_task_without_a_solution_is_left_alone_and_verifies_nothing() -> None:
    environment = shell()
    factories.make_task(environment=environment, hidden={"evaluator": "script"})
    verification = begin(environment)
    assert rollouts_of(verification, "oracle") == []

    ended = end(verification)

    (found,) = ended.report["tasks"]
    assert (found["state"], found["checks"]["solution"]) == ("passed", "skipped")
    assert ended.verdict == "undecided"


def test_an_answer_needs_no_sandbox() -> None:
    environment = factories.make_environment(image=None, evaluator="exact")
    factories.make_task(environment=environment, hidden=ANSWERED)
    verification = begin(environment)
    assert [each.needs_sandbox for each in rollouts_of(verification, "oracle")] == [False, False]

    ended = end(verification)

    assert ended.verdict == "verified"
    (found,) = ended.report["tasks"]
    assert (found["checks"]["starts"], found["checks"]["setup"]) == ("skipped", "skipped")


def test_tasks_are_those_of_the_version_then_of_the_name_then_of_a_set() -> None:
    first = shell()
    old = scripted(first)
    second = save_environment(name=first.name, image=first.image, setup="true")
    other = scripted(shell())
    chosen = [
        {each["task"] for each in end(begin(environment, **more)).report["tasks"]}
        for environment, more in (
            (first, {}),
            (second, {}),
            (second, {"task_set": other[0].task_set}),
        )
    ]
    own = scripted(second)
    chosen.append({each["task"] for each in end(begin(second)).report["tasks"]})

    expected = [old, old, other, own]
    assert chosen == [{str(task.pk) for task in tasks} for tasks in expected]


def test_a_seed_takes_the_same_tasks_again_and_another_takes_others() -> None:
    environment = shell()
    scripted(environment, 30)

    taken = [
        frozenset(
            each["task"] for each in end(begin(environment, tasks=5, seed=seed)).report["tasks"]
        )
        for seed in (1, 1, 2)
    ]

    assert [len(each) for each in taken] == [5, 5, 5]
    assert taken[0] == taken[1] != taken[2]


def test_what_trainers_sent_along_is_not_taken() -> None:
    environment = shell()
    add_inline_tasks(
        experiment=factories.make_experiment(),
        tasks=[InlineTask(environment=environment.name, instruction="x", hidden=SCRIPTED)],
    )

    with pytest.raises(InvalidValue, match="There is no task of environment") as refused:
        begin(environment)
    assert refused.value.code == "verification.no_tasks"
    assert Experiment.objects.filter(purpose="verification").count() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tasks": 0},
        {"tasks": 1001},
        {"repeats": 0},
        {"repeats": 6},
        {"tolerance": -0.1},
        {"tolerance": 1.1},
        {"threshold": float("nan")},
        {"deadline_seconds": 9},
        {"deadline_seconds": float("inf")},
        {"budgets": {"nonsense": 1}},
    ],
)
def test_refuses(wrong: dict[str, Any]) -> None:
    environment = shell()
    scripted(environment)

    with pytest.raises(InvalidValue):
        begin(environment, **wrong)
    assert Verification.objects.count() == 0


def test_one_verification_of_a_version_runs_at_a_time() -> None:
    environment = shell()
    scripted(environment)
    first = begin(environment)

    with pytest.raises(StateConflict, match="runs already") as refused:
        begin(environment)

    assert refused.value.code == "verification.running"
    assert Experiment.objects.count() == 1
    end(first)
    assert begin(environment).state == "running"


def test_of_two_that_begin_at_once_one_does() -> None:
    environment = shell()
    scripted(environment)
    operators = [factories.make_operator() for _ in range(4)]
    together = threading.Barrier(len(operators))
    said: list[str] = []

    def try_it(user: User) -> None:
        together.wait()
        try:
            begin_verification(environment=environment, requested_by=user)
            said.append("begun")
        except StateConflict as refused:
            said.append(refused.code)
        finally:
            close_old_connections()

    threads = [threading.Thread(target=try_it, args=(user,)) for user in operators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(said) == ["begun", *["verification.running"] * 3]
    assert Verification.objects.count() == Experiment.objects.count() == 1


def test_it_goes_on_while_rollouts_do_and_ends_at_its_deadline_with_what_it_has() -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    solved = rollouts_of(verification, "oracle")
    for rollout in solved:
        pay(rollout, 1.0)
    assert advance_verifications() == 0

    Verification.objects.update(deadline_at=timezone.now() - timedelta(seconds=1))
    assert advance_verifications() == 1

    ended = now(verification)
    (found,) = ended.report["tasks"]
    assert (found["checks"]["solution"], found["checks"]["nothing"]) == ("passed", "undecided")
    assert (ended.verdict, ended.environment.verification) == ("undecided", "unverified")
    assert set(
        Rollout.objects.exclude(pk__in=[each.pk for each in solved]).values_list("outcome")
    ) == {("cancelled",)}
    assert advance_verifications() == 0


def test_what_a_process_that_died_left_running_is_stopped() -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    Verification.objects.update(state="done", verdict="undecided", ended_at=timezone.now())

    assert advance_verifications() == 0

    assert now(verification).experiment.state == "stopped"
    assert Rollout.objects.unfinished().count() == 0


def test_cancelling_leaves_the_environment_as_it_was() -> None:
    environment = shell()
    scripted(environment)
    verification = begin(environment)
    for rollout in rollouts_of(verification, "oracle"):
        pay(rollout, 0.0)

    ended = cancel_verification(verification_id=verification.pk)

    assert (ended.state, ended.verdict) == ("cancelled", "undecided")
    assert Environment.objects.get(pk=environment.pk).verification == "unverified"
    assert Rollout.objects.unfinished().count() == 0
    with pytest.raises(StateConflict):
        cancel_verification(verification_id=verification.pk)
    with pytest.raises(NotThere):
        cancel_verification(verification_id=environment.pk)


def test_a_report_that_cannot_be_made_does_not_keep_others_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, whole = shell(), shell()
    for environment in (broken, whole):
        scripted(environment)
    first, second = begin(broken), begin(whole)
    for rollout in Rollout.objects.all():
        pay(rollout, 0.0)
    made = verification_report.report_on

    def fails(verification: Verification) -> Any:
        if verification.pk == first.pk:
            raise RuntimeError("the disk is gone")
        return made(verification)

    monkeypatch.setattr(verifications, "report_on", fails)

    assert advance_verifications() == 1
    assert (now(first).state, now(second).state) == ("running", "done")


def test_no_experiment_begins_on_what_is_broken_unless_that_is_wanted() -> None:
    environment = factories.make_environment(verification="broken")
    tasks = [factories.make_task(environment=environment)]
    sets = [tasks[0].task_set]
    given = {"owner": factories.make_user(), "name": "e", "policy": factories.make_policy()}

    with pytest.raises(StateConflict, match=environment.ref) as refused:
        create_experiment(**given, task_sets=sets)
    assert refused.value.code == "environment.broken"
    with pytest.raises(StateConflict, match="force"):
        begin_evaluation(**given, task_sets=sets)
    assert Experiment.objects.count() == 0

    assert create_experiment(**given, task_sets=sets, allow_broken=True).allow_broken is True
    assert begin_evaluation(**given, task_sets=sets, allow_broken=True).experiment.allow_broken


def test_no_group_is_pushed_to_what_is_broken_unless_that_is_wanted() -> None:
    fine = factories.make_task()
    broken = factories.make_task(environment=factories.make_environment(verification="broken"))
    experiment = factories.make_experiment()
    requests = [GroupRequest(task=task.pk) for task in (fine, broken)]

    with pytest.raises(StateConflict, match=r"^groups\[1\]: A verification found") as refused:
        submit_groups(experiment=experiment, requests=requests)
    assert refused.value.code == "environment.broken"
    assert Group.objects.count() == 0

    changed = update_experiment(experiment_id=experiment.pk, allow_broken=True)
    assert len(submit_groups(experiment=changed, requests=requests)) == 2


def test_no_broken_set_joins_an_experiment() -> None:
    broken = factories.make_task(environment=factories.make_environment(verification="broken"))
    experiment = factories.make_experiment()

    with pytest.raises(StateConflict):
        update_experiment(experiment_id=experiment.pk, task_sets=[broken.task_set])
    assert experiment.task_sets.count() == 0

    update_experiment(experiment_id=experiment.pk, task_sets=[broken.task_set], allow_broken=True)
    assert list(experiment.task_sets.all()) == [broken.task_set]


def test_a_verifications_experiment_is_nobodys() -> None:
    environment = shell()
    (task,) = scripted(environment)
    experiment = begin(environment).experiment

    assert Experiment.objects.visible_to(experiment.owner).count() == 0
    with pytest.raises(StateConflict, match="begin another one"):
        submit_groups(experiment=experiment, requests=[GroupRequest(task=task.pk)])
    with pytest.raises(StateConflict):
        update_experiment(experiment_id=experiment.pk, name="mine")


def test_only_a_verification_has_no_policy() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        factories.make_experiment(policy=None)


def test_spread_is_by_nearest_rank() -> None:
    assert spread([3.0]) == {"p50": 3.0, "p90": 3.0, "max": 3.0}
    assert spread([float(each) for each in range(10, 0, -1)]) == {
        "p50": 5.0,
        "p90": 9.0,
        "max": 10.0,
    }
