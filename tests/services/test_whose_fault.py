"""Grading that breaks: a policy that broke it pays with its reward, the service never does."""

from collections.abc import Callable
from typing import Any

import pytest

from evaluators.base import Artefacts, EvaluatorCancelled, EvaluatorTimeout
from rollouts.exceptions import InfraFault, StageTimeout
from rollouts.models import Attempt, Evaluation, Experiment, Rollout, Task
from rollouts.services.claim import Claim
from rollouts.stages import evaluation, runner
from rollouts.stages.evaluation import carry_out_eval
from rollouts.stages.lease import Held
from sandboxes.models import Sandbox
from sandboxes.runtime.exceptions import EnterFailed, SandboxGone
from sandboxes.runtime.protocol import SandboxHandle
from tests.services.line import active_attempt, bring_to, make_experiment, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)

LAYER = "what-the-agent-left"
PREPARED = "what-the-setups-left"
WORKS = Artefacts(reward_txt=b"1", exit_code=0)
FAILURE_REWARD = -1.5

Grade = Callable[[Held, Any], Artefacts]


@pytest.fixture
def claim() -> Claim:
    """Return the claim of a rollout in EVAL whose agent left a layer."""
    workers = make_node()
    make_node()
    make_group(experiment=make_experiment(failure_reward=FAILURE_REWARD))
    made = bring_to(Rollout.objects.get(), "eval", workers)
    assert made is not None
    Sandbox.objects.filter(purpose="run").update(
        state="frozen", frozen_layer=LAYER, layers=[PREPARED]
    )
    return made


@pytest.fixture
def tests_that(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Return how to set what the tests do: on the agent's layer, and on the untouched one.

    The list that it returns tells which gradings were made, True for the untouched one.
    """

    def install(*, on_the_agents: Grade, on_the_untouched: Grade) -> list[bool]:
        graded: list[bool] = []

        def started(*, layers: tuple[str, ...] | None, **_values: Any) -> SandboxHandle:
            assert layers in (None, (LAYER, PREPARED))
            top = layers[0] if layers else ""
            return SandboxHandle(name="x", pid=1, start_ticks=1, layer=top)

        def tested(held: Held, grading: Any, handle: SandboxHandle, env: Any) -> Artefacts:
            assert env == {}
            untouched = not handle.layer
            graded.append(untouched)
            return (on_the_untouched if untouched else on_the_agents)(held, grading)

        monkeypatch.setattr(evaluation, "start_prepared_sandbox", started)
        monkeypatch.setattr(evaluation, "_tested", tested)
        return graded

    return install


def work(_held: Held, _grading: Any) -> Artefacts:
    return WORKS


def leave_no_reward(_held: Held, _grading: Any) -> Artefacts:
    return Artefacts(exit_code=1)


def hang(held: Held, grading: Any) -> Artefacts:
    """Use up all the seconds of this grading, by the stage's clock."""
    held._deadline -= evaluation._seconds(held, grading)
    raise EvaluatorTimeout("the tests did not end")


def gone(limit: str | None) -> Grade:
    def end(_held: Held, _grading: Any) -> Artefacts:
        raise SandboxGone("the sandbox no longer runs", limit=limit)

    return end


def expect_the_failure_reward(code: str) -> None:
    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.outcome) == ("done", "scored")
    assert (rollout.reward, rollout.rewards) == (FAILURE_REWARD, {"reward": FAILURE_REWARD})
    assert Evaluation.objects.get().details["policy_fault"] == code


def expect_another_try_of_eval(code: str) -> None:
    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.reward, rollout.restarts) == ("eval", None, 0)
    tries = Attempt.objects.filter(stage="eval").values_list("number", "state", "failure_code")
    assert list(tries) == [(1, "failed", code), (2, "queued", "")]
    assert active_attempt(rollout).node == rollout.node
    assert Sandbox.objects.get(purpose="run").frozen_layer == LAYER
    assert not Evaluation.objects.exists()


def test_tests_that_work_are_graded_once(claim: Claim, tests_that: Any) -> None:
    graded = tests_that(on_the_agents=work, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False]
    rollout = Rollout.objects.get()
    assert (rollout.outcome, rollout.reward) == ("scored", 1.0)


def test_a_policy_that_makes_its_tests_hang_gets_the_failure_reward(
    claim: Claim, tests_that: Any
) -> None:
    allowed: list[float] = []

    def measured(held: Held, grading: Any) -> Artefacts:
        allowed.append(evaluation._seconds(held, grading))
        return WORKS

    graded = tests_that(on_the_agents=hang, on_the_untouched=measured)

    carry_out_eval(Held(claim))

    assert graded == [False, True]
    assert allowed == [600.0]
    expect_the_failure_reward("evaluator.timeout")


def test_a_task_with_more_seconds_than_the_stage_leaves_the_untouched_grading_its_share(
    tests_that: Any,
) -> None:
    workers = make_node()
    experiment = make_experiment(budgets={"eval_seconds": 30}, failure_reward=FAILURE_REWARD)
    group = make_group(experiment=experiment)
    Task.objects.filter(pk=group.task_id).update(payload={"verifier_timeout_seconds": 7200.0})
    claim = bring_to(Rollout.objects.get(), "eval", workers)
    assert claim is not None
    Sandbox.objects.filter(purpose="run").update(
        state="frozen", frozen_layer=LAYER, layers=[PREPARED]
    )
    allowed: list[float] = []

    def measured(held: Held, grading: Any) -> Artefacts:
        allowed.append(evaluation._seconds(held, grading))
        return WORKS

    tests_that(on_the_agents=hang, on_the_untouched=measured)

    carry_out_eval(Held(claim))

    assert allowed == [30.0]
    expect_the_failure_reward("evaluator.timeout")


def test_a_task_with_few_seconds_for_its_tests_gives_them_no_more(
    claim: Claim, tests_that: Any
) -> None:
    Task.objects.update(payload={"verifier_timeout_seconds": 4.0})
    allowed: list[float] = []

    def measured(held: Held, grading: Any) -> Artefacts:
        allowed.append(evaluation._seconds(held, grading))
        return WORKS

    tests_that(on_the_agents=measured, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert allowed == [4.0]


@pytest.mark.parametrize("limit", ["memory", "disk", "lifetime"])
def test_a_policy_that_drives_its_tests_over_a_limit_gets_the_failure_reward(
    limit: str, claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=gone(limit), on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False, True]
    expect_the_failure_reward("evaluator.over_limit")


def test_a_policy_that_leaves_no_reward_file_gets_the_failure_reward(
    claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=leave_no_reward, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False, True]
    expect_the_failure_reward("evaluator.reward_missing")


def test_a_sandbox_that_ended_at_no_limit_is_the_services_fault_and_eval_is_tried_again(
    claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=gone(None), on_the_untouched=work)
    held = Held(claim)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(held)

    assert graded == [False]
    fault = raised.value
    assert (fault.code, fault.retryable) == ("sandbox.gone", True)
    assert (fault.restart_from_init, fault.timed_out) == (False, False)
    runner._settle(held, fault)
    expect_another_try_of_eval("sandbox.gone")


def test_an_untouched_sandbox_that_ended_at_no_limit_judges_nobody(
    claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=leave_no_reward, on_the_untouched=gone(None))
    held = Held(claim)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(held)

    assert graded == [False, True]
    assert raised.value.code == "sandbox.gone"
    runner._settle(held, raised.value)
    expect_another_try_of_eval("sandbox.gone")


@pytest.mark.parametrize(
    ("on_the_agents", "on_the_untouched", "code"),
    [
        (hang, leave_no_reward, "evaluator.reward_missing"),
        (gone("memory"), hang, "evaluator.timeout"),
        (leave_no_reward, gone("memory"), "evaluator.over_limit"),
    ],
)
def test_when_both_gradings_fail_the_evaluator_is_at_fault_with_the_code_of_the_untouched_one(
    on_the_agents: Grade, on_the_untouched: Grade, code: str, claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=on_the_agents, on_the_untouched=on_the_untouched)
    held = Held(claim)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(held)

    assert graded == [False, True]
    fault = raised.value
    assert (fault.code, fault.restart_from_init, fault.timed_out) == (code, False, False)
    runner._settle(held, fault)
    expect_another_try_of_eval(code)


def test_an_evaluator_that_always_fails_ends_the_rollout_without_a_reward(
    claim: Claim, tests_that: Any
) -> None:
    Experiment.objects.update(max_attempts=1)
    tests_that(on_the_agents=leave_no_reward, on_the_untouched=leave_no_reward)
    held = Held(claim)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(held)
    runner._settle(held, raised.value)

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.outcome, rollout.reward) == ("done", "infra_failed", None)
    assert rollout.failure_code == "evaluator.reward_missing"


def test_no_time_left_for_the_untouched_grading_is_no_verdict(
    claim: Claim, tests_that: Any
) -> None:
    def use_up_the_stage(held: Held, _grading: Any) -> Artefacts:
        held._deadline = 0.0
        raise EvaluatorTimeout("the tests did not end")

    def measured(held: Held, grading: Any) -> Artefacts:
        evaluation._seconds(held, grading)
        return WORKS

    tests_that(on_the_agents=use_up_the_stage, on_the_untouched=measured)

    with pytest.raises(StageTimeout) as raised:
        carry_out_eval(Held(claim))

    assert (raised.value.code, raised.value.timed_out) == ("eval.timeout", True)
    assert Rollout.objects.get().reward is None


def test_a_cancel_amid_the_tests_is_not_held_against_the_policy(
    claim: Claim, tests_that: Any
) -> None:
    def be_cancelled(held: Held, _grading: Any) -> Artefacts:
        held.cause = "cancelled"
        raise EvaluatorCancelled("the tests were cancelled")

    graded = tests_that(on_the_agents=be_cancelled, on_the_untouched=work)
    held = Held(claim)

    with pytest.raises(EvaluatorCancelled) as raised:
        carry_out_eval(held)
    runner._settle(held, raised.value)

    assert graded == [False]
    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.outcome, rollout.reward) == ("done", "cancelled", None)


def test_a_fault_seen_while_the_worker_must_stop_is_given_back_and_judged_by_nobody(
    claim: Claim, tests_that: Any
) -> None:
    def be_shut_down(held: Held, _grading: Any) -> Artefacts:
        held.cause = "shutdown"
        raise EvaluatorTimeout("the tests did not end")

    graded = tests_that(on_the_agents=be_shut_down, on_the_untouched=work)
    held = Held(claim)

    with pytest.raises(EvaluatorTimeout) as raised:
        carry_out_eval(held)
    runner._settle(held, raised.value)

    assert graded == [False]
    tries = Attempt.objects.filter(stage="eval").values_list("state", "failure_code")
    assert list(tries) == [("lost", "worker.shutdown"), ("queued", "")]


def test_a_layer_that_is_not_there_sends_the_rollout_back_to_init(
    claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=work, on_the_untouched=work)
    Sandbox.objects.filter(purpose="run").update(state="ready", frozen_layer="")
    held = Held(claim)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(held)
    runner._settle(held, raised.value)

    assert graded == []
    assert raised.value.code == "sandbox.layer_missing"
    assert Rollout.objects.get().state == "queued"


def test_a_sandbox_that_cannot_be_entered_again_and_again_is_the_policys_fault(
    claim: Claim, tests_that: Any
) -> None:
    graded = tests_that(on_the_agents=fail_to_enter, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False, False, True]
    expect_the_failure_reward("evaluator.broken_sandbox")


def test_a_sandbox_that_cannot_be_entered_once_is_tested_again(
    claim: Claim, tests_that: Any
) -> None:
    faults = iter([True])

    def enter_the_second_time(held: Held, grading: Any) -> Artefacts:
        return fail_to_enter(held, grading) if next(faults, False) else WORKS

    graded = tests_that(on_the_agents=enter_the_second_time, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False, False]
    assert Rollout.objects.get().reward == 1.0


def fail_to_enter(_held: Held, _grading: Any) -> Artefacts:
    raise EnterFailed("no shell")
