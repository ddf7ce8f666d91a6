"""Grading that breaks: a policy that broke it pays with its reward, the service never does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import (
    Base,
    EvaluatorCancelled,
    EvaluatorTimeout,
    JudgeUnavailable,
    Phase,
    PhaseResult,
)
from rollouts.exceptions import InfraFault, StageTimeout
from rollouts.models import Attempt, Evaluation, Experiment, Rollout, Task
from rollouts.services.claim import Claim
from rollouts.stages import phases, runner
from rollouts.stages.evaluation import carry_out_eval
from rollouts.stages.lease import Held
from rollouts.stages.phases import Bench
from sandboxes.models import Sandbox
from sandboxes.runtime.exceptions import EnterFailed, ImageUnusable, SandboxGone
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.protocol import SandboxHandle
from tests.script_left import script_left
from tests.services.line import active_attempt, bring_to, make_experiment, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)

LAYER = "layer-" + "a" * 32
PREPARED = "prepared-" + "b" * 32
WORKS = script_left(reward_txt=b"1", exit_code=0)
FAILURE_REWARD = -1.5

Grade = Callable[[Bench], PhaseResult]


@pytest.fixture(autouse=True)
def storage(settings: Any, tmp_path: Path) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Return the node that holds what the agent and the setups left."""
    made = FakeRuntime()
    made.layers.keep(PREPARED, {}, (), image="base")
    files = {"/app/work": (b"done", 0o644), "/bin/bash": (b"bad", 0o755)}
    made.layers.keep(LAYER, files, (PREPARED,), image="base")
    monkeypatch.setattr(phases, "node_runtime", lambda: made)
    return made


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
def tests_that(monkeypatch: pytest.MonkeyPatch, node: FakeRuntime) -> Callable[..., list[bool]]:
    """Return how to set what the tests do: on the agent's layer, and on the untouched one.

    The list that it returns tells which gradings were made, True for the untouched one.
    """

    def install(*, on_the_agents: Grade, on_the_untouched: Grade) -> list[bool]:
        graded: list[bool] = []

        def started(
            *, layers: tuple[str, ...] | None, closed: bool, **_values: Any
        ) -> SandboxHandle:
            assert closed
            assert layers is None or layers[1:] == (PREPARED,)
            top = layers[0] if layers else ""
            assert not top or node.layers.merged((top,)) == {"/app/work": (b"done", 0o644)}
            return SandboxHandle(name="x", pid=1, start_ticks=1, layer=top)

        def tested(bench: Bench, phase: Phase, handle: SandboxHandle, env: Any) -> PhaseResult:
            assert (phase.name, phase.base, env) == ("tests", Base.AGENT, {})
            untouched = not handle.layer
            graded.append(untouched)
            return (on_the_untouched if untouched else on_the_agents)(bench)

        monkeypatch.setattr(phases, "start_prepared_sandbox", started)
        monkeypatch.setattr(Bench, "carry_out", tested)
        return graded

    return install


def work(_bench: Bench) -> PhaseResult:
    return WORKS


def leave_no_reward(_bench: Bench) -> PhaseResult:
    return script_left()


def hang(bench: Bench) -> PhaseResult:
    """Use up all the seconds of this grading, by the stage's clock."""
    bench._held._deadline -= bench.seconds()
    raise EvaluatorTimeout("the tests did not end")


def gone(limit: str | None) -> Grade:
    def end(_bench: Bench) -> PhaseResult:
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

    def measured(bench: Bench) -> PhaseResult:
        allowed.append(bench.seconds())
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

    def measured(bench: Bench) -> PhaseResult:
        allowed.append(bench.seconds())
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

    def measured(bench: Bench) -> PhaseResult:
        allowed.append(bench.seconds())
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
    def use_up_the_stage(bench: Bench) -> PhaseResult:
        bench._held._deadline = 0.0
        raise EvaluatorTimeout("the tests did not end")

    tests_that(on_the_agents=use_up_the_stage, on_the_untouched=work)

    with pytest.raises(StageTimeout) as raised:
        carry_out_eval(Held(claim))

    assert (raised.value.code, raised.value.timed_out) == ("eval.timeout", True)
    assert Rollout.objects.get().reward is None


def test_a_cancel_amid_the_tests_is_not_held_against_the_policy(
    claim: Claim, tests_that: Any
) -> None:
    def be_cancelled(bench: Bench) -> PhaseResult:
        bench._held.cause = "cancelled"
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
    def be_shut_down(bench: Bench) -> PhaseResult:
        bench._held.cause = "shutdown"
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

    def enter_the_second_time(bench: Bench) -> PhaseResult:
        return fail_to_enter(bench) if next(faults, False) else WORKS

    graded = tests_that(on_the_agents=enter_the_second_time, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert graded == [False, False]
    assert Rollout.objects.get().reward == 1.0


def test_what_cannot_be_cut_out_of_the_agents_layer_is_the_policys_fault(
    claim: Claim, tests_that: Any, node: FakeRuntime
) -> None:
    graded = tests_that(on_the_agents=work, on_the_untouched=work)
    node.fail_next("cut_layers", ImageUnusable("too deep"), ImageUnusable("too deep"))

    carry_out_eval(Held(claim))

    assert graded == [True]
    expect_the_failure_reward("evaluator.broken_sandbox")


def test_the_layers_made_for_a_grading_are_discarded_with_its_sandbox(
    claim: Claim, tests_that: Any, node: FakeRuntime
) -> None:
    tests_that(on_the_agents=work, on_the_untouched=work)

    carry_out_eval(Held(claim))

    assert node.list_layers() == [LAYER]
    assert [method for method, _name in node.calls] == ["cut_layers", "stop", "discard_layer"]


def test_a_fault_that_is_the_graders_by_its_kind_judges_nobody(
    claim: Claim, tests_that: Any
) -> None:
    def find_no_judge(_bench: Bench) -> PhaseResult:
        raise JudgeUnavailable("no answer")

    graded = tests_that(on_the_agents=find_no_judge, on_the_untouched=work)

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(Held(claim))

    assert (raised.value.code, graded) == ("evaluator.judge_unavailable", [False])
    assert not Evaluation.objects.exists()


def fail_to_enter(_bench: Bench) -> PhaseResult:
    raise EnterFailed("no shell")
