# ruff: noqa: ARG002 - scripts have the arguments of what they stand for
"""A policy that uses up its sandbox is scored at its first try: RUN to the end of EVAL."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import PhaseResult
from rollouts.inference.protocol import Generation
from rollouts.models import Attempt, Evaluation, Experiment, JournalEntry, Rollout
from rollouts.services.claim import Claim
from rollouts.services.finish import give_back
from rollouts.services.trajectories import read_trajectory
from rollouts.stages import evaluation, inside, network, phases, runner, running
from rollouts.stages.generating import Generator
from rollouts.stages.lease import Held
from sandboxes.models import Environment, Sandbox
from sandboxes.runtime.exceptions import SandboxGone
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from tests.script_left import script_left
from tests.services.line import (
    bring_to,
    claim_active,
    make_experiment,
    make_group,
    make_node,
    make_worker,
)
from tests.unit.handlers.episode_parts import CharacterRenderer, said

pytestmark = pytest.mark.django_db(transaction=True)

FAILURE_REWARD = -1.5
PASSED = script_left(reward_txt=b"1", exit_code=0)


class Model:
    """Say one text a turn; something may happen before one of them."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.before: dict[str, Callable[[], None]] = {}

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        text = self.texts.pop(0)
        self.before.get(text, lambda: None)()
        return said(text)


class Node(FakeRuntime):
    """A node in memory whose sandboxes end at a limit when their policy says `eat`."""

    def __init__(self, limit: str | None, model: Model) -> None:
        super().__init__(script=self._answer)
        self.limit = limit
        self.model = model
        self.ended: set[str] = set()
        self.tells = True  # a session may see no more than that its program is gone

    def end(self, name: str) -> None:
        """End a sandbox at the limit; its folder stays."""
        self.ended.add(name)

    def alive(self, handle: SandboxHandle) -> bool:
        return handle.name not in self.ended and super().alive(handle)

    def _answer(self, sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
        if command == "eat":
            self.end(sandbox.handle.name)
            if not self.tells:
                raise SandboxGone("the program is gone")
            self._require(sandbox.handle.name)
        return Answer(output="seen")

    def _find(self, method: str, handle: SandboxHandle) -> FakeSandbox:
        if method != "freeze":
            self._require(handle.name)
        return super()._find(method, handle)

    def _require(self, name: str) -> None:
        if name in self.ended:
            raise SandboxGone("the sandbox no longer runs", limit=self.limit)


@pytest.fixture(autouse=True)
def storage(settings: Any, tmp_path: Path) -> None:
    settings.STORAGES = {
        **settings.STORAGES,
        "trajectories": {
            **settings.STORAGES["trajectories"],
            "OPTIONS": {"location": str(tmp_path)},
        },
    }


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Claim, Node]]:
    """Return how to bring a rollout to RUN on a node in memory, with what its policy will say."""

    def begun(
        *texts: str, limit: str | None = "memory", evaluator: str = "script"
    ) -> tuple[Claim, Node]:
        workers = make_node()
        group = make_group(experiment=make_experiment(failure_reward=FAILURE_REWARD))
        Environment.objects.update(
            agent="command_line", tools=["bash", "submit"], evaluator=evaluator
        )
        claim = bring_to(group.rollouts.get(), "run", workers)
        assert claim is not None
        model = Model(*texts)
        node = Node(limit, model)
        handle = node.start(SandboxSpec(name="r", image="base"), timeout_seconds=60)
        Sandbox.objects.filter(owner=claim.rollout_id).update(
            state="ready", handle=handle.as_dict()
        )
        for module in (inside, network, running):
            monkeypatch.setattr(module, "node_runtime", lambda: node)
        monkeypatch.setattr(running, "load_renderer", lambda _name: CharacterRenderer())
        monkeypatch.setattr(Generator, "__call__", lambda _self, ids, most: model(ids, most))
        return claim, node

    return begun


@pytest.fixture
def tests_that(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Return how to set what tests on the untouched sandbox find, or raise."""

    def install(found: PhaseResult | Exception) -> list[bool]:
        graded: list[bool] = []

        def started(*, layers: Any, **_values: Any) -> SandboxHandle:
            assert layers is None
            return SandboxHandle(name="g", pid=1, start_ticks=1, layer="")

        def tested(_bench: Any, phase: Any, handle: Any, env: Any) -> PhaseResult:
            graded.append(True)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(phases, "start_prepared_sandbox", started)
        monkeypatch.setattr(phases.Bench, "carry_out", tested)
        return graded

    return install


def evaluate(rollout: Rollout) -> None:
    """Carry out EVAL as the runner does."""
    worker = Attempt.objects.get(rollout=rollout, state="queued")
    claim = claim_active(rollout, make_worker("eval"))
    assert claim.attempt_id == worker.pk
    held = Held(claim)
    try:
        evaluation.carry_out_eval(held)
    except Exception as error:
        runner._settle(held, error)


def sampled(rollout: Rollout) -> list[int]:
    """Return the sampled tokens of the stored trajectory."""
    return [
        token
        for segment in read_trajectory(rollout=rollout)["segments"]
        for token, mask in zip(segment["response_ids"], segment["response_mask"], strict=True)
        if mask
    ]


def tokens(*texts: str) -> list[int]:
    return [token for text in texts for token in said(text).token_ids]


@pytest.mark.parametrize("limit", ["memory", "disk"])
def test_a_policy_that_uses_up_its_sandbox_gets_the_failure_reward_at_its_first_try(
    limit: str, begin: Any, tests_that: Any
) -> None:
    graded = tests_that(PASSED)
    claim, node = begin("ls", "eat", limit=limit)

    running.carry_out_run(Held(claim))

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.stop_reason, rollout.turns) == ("eval", "sandbox_limit", 2)
    assert ("freeze", "r") not in node.calls
    evaluate(rollout)
    rollout.refresh_from_db()
    assert (rollout.outcome, rollout.reward) == ("scored", FAILURE_REWARD)
    assert (rollout.failure_code, rollout.restarts, graded) == ("", 0, [True])
    assert Evaluation.objects.get().details["policy_fault"] == "sandbox.over_limit"
    tries = Attempt.objects.order_by("created_at").values_list("stage", "state", "number")
    assert list(tries) == [(stage, "finished", 1) for stage in ("init", "run", "eval")]
    assert sampled(rollout) == tokens("ls", "eat")
    assert rollout.sampled_tokens == len(tokens("ls", "eat"))
    assert read_trajectory(rollout=rollout)["agent"]["over_limit"] == limit


def test_a_session_that_does_not_know_why_its_program_went_is_helped_out(begin: Any) -> None:
    claim, node = begin("eat")
    node.tells = False

    running.carry_out_run(Held(claim))

    assert Rollout.objects.get().stop_reason == "sandbox_limit"


@pytest.mark.parametrize("limit", ["lifetime", None])
def test_any_other_end_of_a_sandbox_is_tried_again(limit: str | None, begin: Any) -> None:
    claim, _node = begin("eat", limit=limit)
    held = Held(claim)

    with pytest.raises(SandboxGone) as raised:
        running.carry_out_run(held)
    runner._settle(held, raised.value)

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.stop_reason, rollout.restarts) == ("queued", None, 1)
    attempt = Attempt.objects.get(stage="run")
    assert (attempt.state, attempt.failure_code) == ("failed", "sandbox.gone")


def test_where_the_untouched_sandbox_fails_too_nobody_is_judged(
    begin: Any, tests_that: Any
) -> None:
    tests_that(script_left())
    claim, _node = begin("eat")
    running.carry_out_run(Held(claim))
    Experiment.objects.update(max_attempts=1)

    evaluate(Rollout.objects.get())

    rollout = Rollout.objects.get()
    assert (rollout.outcome, rollout.reward) == ("infra_failed", None)
    assert rollout.failure_code == "evaluator.reward_missing"


@pytest.mark.parametrize(("source", "reward"), [("answer", 0.0), ("last_message", 1.0)])
def test_an_evaluator_without_a_sandbox_grades_what_was_said(
    source: str, reward: float, begin: Any
) -> None:
    claim, _node = begin("ls", "eat", evaluator="regex")
    Environment.objects.update(evaluator_settings={"source": source, "pattern": "eat"})
    running.carry_out_run(Held(claim))

    evaluate(Rollout.objects.get())

    rollout = Rollout.objects.get()
    assert (rollout.stop_reason, rollout.answer) == ("sandbox_limit", None)
    assert (rollout.outcome, rollout.reward) == ("scored", reward)


def take_over(claim: Claim) -> Claim:
    """Give a RUN back as a worker that was shut down does, and claim it again."""
    give_back(claim=claim)
    return claim_active(Rollout.objects.get(), make_worker("run"))


def die(claim: Claim, monkeypatch: pytest.MonkeyPatch, *, at: str) -> Claim:
    """Carry RUN out until the worker dies at this command; return the next worker's claim."""

    def carry_out(node: Node, handle: SandboxHandle, command: str, most: int) -> Any:
        if command == at:
            raise WorkerDied
        return FakeRuntime.run_command(node, handle, command, most)

    with monkeypatch.context() as patched:
        patched.setattr(Node, "run_command", carry_out)
        with pytest.raises(WorkerDied):
            running.carry_out_run(Held(claim))
    return take_over(claim)


class WorkerDied(BaseException):
    """What a test ends a worker with."""


@pytest.mark.parametrize("network_kind", ["none", "model_only"])
@pytest.mark.parametrize("interrupted", ["restart", "report"])
def test_a_sandbox_that_ended_while_no_worker_held_it_comes_to_the_same_end(
    interrupted: str, network_kind: str, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, node = begin("ls", "eat")
    Environment.objects.update(
        agent_settings={"interrupted_command": interrupted}, network=network_kind
    )
    claim = die(claim, monkeypatch, at="eat")
    node.end("r")

    running.carry_out_run(Held(claim))

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.stop_reason, rollout.turns) == ("eval", "sandbox_limit", 2)
    assert sampled(rollout) == tokens("ls", "eat")
    roles = [each["role"] for each in read_trajectory(rollout=rollout)["messages"]]
    assert roles[:4] == ["user", "assistant", "user", "assistant"]


def test_nothing_more_is_sampled_once_it_ended(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, node = begin("(sleep 9; eat) &", "ls", "submit")
    claim = die(claim, monkeypatch, at="ls")
    JournalEntry.objects.filter(turn=1).delete()  # it died before that turn was written
    node.end("r")

    running.carry_out_run(Held(claim))

    rollout = Rollout.objects.get()
    assert (rollout.stop_reason, rollout.turns) == ("sandbox_limit", 1)
    assert sampled(rollout) == tokens("(sleep 9; eat) &")


def test_before_the_first_turn_no_policy_is_to_blame(begin: Any) -> None:
    claim, node = begin("ls")
    node.end("r")
    held = Held(claim)

    with pytest.raises(SandboxGone) as raised:
        running.carry_out_run(held)
    runner._settle(held, raised.value)

    assert Rollout.objects.get().state == "queued"


def test_what_ended_after_the_last_word_is_graded_as_it_was_left(begin: Any) -> None:
    claim, node = begin("(sleep 9; eat) &", "submit")
    node.model.before["submit"] = lambda: node.end("r")

    running.carry_out_run(Held(claim))

    rollout = Rollout.objects.get()
    assert (rollout.state, rollout.stop_reason) == ("eval", "finished")
    assert Sandbox.objects.get(purpose="run").frozen_layer
