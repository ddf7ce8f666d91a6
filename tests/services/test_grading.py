"""The sandboxes of a grading: what each starts on, what is run in it, what is taken out of it."""

# ruff: noqa: ARG002 - an evaluator has the arguments of its kind

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from evaluators.base import (
    Artefacts,
    Base,
    Command,
    Evaluator,
    JsonMap,
    Phase,
    PhaseResult,
    Score,
)
from rollouts.exceptions import InfraFault
from rollouts.models import Evaluation, Group, Rollout, Task
from rollouts.services.claim import Claim
from rollouts.stages import evaluation, initialisation, network, phases
from rollouts.stages.evaluation import MAX_PHASES, carry_out_eval
from rollouts.stages.lease import Held
from sandboxes.models import Environment, Sandbox, Snapshot
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from tests.services.line import bring_to, make_experiment, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)

LAYER, PREPARED, TRUNK = f"layer-{'a' * 32}", f"prepared-{'b' * 32}", f"layer-{'c' * 32}"
RUN = Command(argv=("sh", "/tests/run"), seconds=5)


class InTurn(Evaluator):
    """Ask for given phases one after the other, and remember what it was shown."""

    name, description, needs_sandbox = "script", "in turn", True
    seen: ClassVar[list[Artefacts]] = []

    def __init__(self, *wanted: Phase) -> None:
        self.wanted = wanted

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        pass

    def next_phase(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Phase | None:
        done = len(artefacts.phases)
        return self.wanted[done] if done < len(self.wanted) else None

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        self.seen.append(artefacts)
        return Score(reward=1.0, rewards={"reward": 1.0})


class Node(FakeRuntime):
    """A node in memory that remembers what each of its sandboxes started on and saw."""

    def __init__(self) -> None:
        super().__init__(prefix="prorl-", script=self._answer)
        self.started: list[FakeSandbox] = []
        self.answers: dict[str, Answer] = {}
        for reference, below, files in (
            (PREPARED, (), {"/setup": (b"s", 0o644)}),
            (TRUNK, (PREPARED,), {"/app/trunk": (b"t", 0o644), "/bin/sh": (b"bad", 0o755)}),
            (LAYER, (PREPARED,), {"/app/work": (b"w", 0o644), "/bin/sh": (b"bad", 0o755)}),
        ):
            self.layers.keep(reference, files, below, image="base")

    def start(self, spec: Any, **values: Any) -> Any:
        handle = super().start(spec, **values)
        self.started.append(self.sandboxes[spec.name])
        return handle

    def _answer(self, sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
        return self.answers.get(command.split()[-1], Answer(output=f"ran {command}"))


@pytest.fixture(autouse=True)
def storage(settings: Any, tmp_path: Path) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Node:
    made = Node()
    for module in (phases, initialisation, network):
        monkeypatch.setattr(module, "node_runtime", lambda: made)
    monkeypatch.setattr(initialisation, "_get_image", lambda _environment, _held: None)
    return made


@pytest.fixture
def claim() -> Claim:
    """Return the claim of a rollout in EVAL whose agent left a layer."""
    workers = make_node()
    make_group(experiment=make_experiment())
    Task.objects.update(
        hidden={"tests": {"run": {"base64": "dHJ1ZQ==", "mode": 0o755}}}, instruction="Do it."
    )
    made = bring_to(Rollout.objects.get(), "eval", workers)
    assert made is not None
    Sandbox.objects.filter(purpose="run").update(
        state="frozen", frozen_layer=LAYER, layers=[PREPARED]
    )
    return made


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., InTurn]:
    """Return how to have phases asked for."""

    def install(*wanted: Phase) -> InTurn:
        evaluator = InTurn(*wanted)
        InTurn.seen.clear()

        def advance(
            _name: str, settings: JsonMap, payload: JsonMap, artefacts: Artefacts, **_: Any
        ) -> Phase | Score:
            found = evaluator.next_phase(settings, payload, artefacts)
            return found or evaluator.score(settings, payload, artefacts)

        monkeypatch.setattr(evaluation, "advance", advance)
        return evaluator

    return install


def paths(sandbox: FakeSandbox) -> set[str]:
    return set(sandbox.files)


def test_each_phase_has_a_fresh_sandbox_and_is_shown_what_the_earlier_ones_left(
    claim: Claim, node: Node, asks: Any
) -> None:
    first = Phase(name="first", commands=(RUN,), files={"/app/in": (b"i", 0o644)}, tests=True)
    second = Phase(name="second", collect={"/app/work": 10, "/app/none": 10, "/app/in": 10})
    asks(first, second)

    carry_out_eval(Held(claim))

    assert [paths(each) for each in node.started] == [
        {"/setup", "/app/work", "/app/in", "/tests/run"},
        {"/setup", "/app/work"},
    ]
    assert {each.spec.hidden for each in node.started} == {("/tests", "/logs", "/solution")}
    (seen,) = InTurn.seen
    ran, left = seen.phases
    assert [each.stdout for each in ran.commands] == [b"ran sh /tests/run"]
    assert left == PhaseResult(
        name="second", files={"/app/work": b"w", "/app/none": None, "/app/in": None}
    )
    assert (seen.answer, seen.last_message) == ("42", "submit 42")
    assert (seen.turns, seen.tokens, seen.stop_reason) == (2, 4, "finished")
    assert (seen.instruction, seen.messages) == ("Do it.", ())
    assert Rollout.objects.get().reward == 1.0
    assert node.list_layers() == [LAYER, TRUNK]


@pytest.mark.parametrize(
    ("workspace", "expected"),
    [
        (("/",), {"/setup", "/app/work", "/bin/sh"}),
        (("/app",), {"/setup", "/app/work"}),
        (("/bin", "/app/none"), {"/setup", "/bin/sh"}),
    ],
)
def test_only_the_workspace_of_what_the_agent_left_is_there(
    workspace: tuple[str, ...], expected: set[str], claim: Claim, node: Node, asks: Any
) -> None:
    asks(Phase(name="tests", workspace=workspace))

    carry_out_eval(Held(claim))

    assert [paths(each) for each in node.started] == [expected]


def test_a_prepared_phase_has_nothing_of_any_agents_in_it(
    claim: Claim, node: Node, asks: Any
) -> None:
    rollout = Rollout.objects.get()
    snapshot = Snapshot.objects.create(
        owner=rollout.pk, environment=rollout.environment, layers=[TRUNK, PREPARED]
    )
    Group.objects.update(snapshot=snapshot)
    Sandbox.objects.filter(purpose="run").update(layers=[TRUNK, PREPARED])
    asks(
        Phase(name="agent"),
        Phase(name="whole", workspace=("/",)),
        Phase(name="clean", base=Base.PREPARED),
    )

    carry_out_eval(Held(claim))

    assert [paths(each) for each in node.started] == [
        {"/setup", "/app/work", "/app/trunk"},
        {"/setup", "/app/work", "/app/trunk", "/bin/sh"},
        {"/setup"},
    ]


def test_a_command_that_runs_out_of_its_own_seconds_does_not_stop_the_next(
    claim: Claim, node: Node, asks: Any
) -> None:
    node.answers["slow"] = Answer(timed_out=True, output="so far")
    slow = Command(argv=("sh", "slow"), seconds=5)
    asks(Phase(name="tests", commands=(slow, RUN)))

    carry_out_eval(Held(claim))

    first, second = InTurn.seen[0].phases[0].commands
    assert (first.exit_code, first.timed_out, first.stdout) == (None, True, b"so far")
    assert (second.exit_code, second.timed_out) == (0, False)


def test_a_command_that_uses_up_the_gradings_time_is_a_fault_with_the_log(
    claim: Claim, node: Node, asks: Any
) -> None:
    node.answers["slow"] = Answer(timed_out=True)
    node.answers[str(phases.LOG_BYTES)] = Answer(output="the end of the log")
    slow = Command(argv=("sh", "slow"))
    asks(Phase(name="tests", commands=(slow,), log="/logs/out"))

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(Held(claim))

    assert raised.value.code == "evaluator.timeout"
    cause = raised.value.__cause__
    assert getattr(cause, "log", "") == "the end of the log"


def test_an_evaluator_that_asks_without_end_is_at_fault(
    claim: Claim, node: Node, asks: Any
) -> None:
    asks(*(Phase(name=str(number)) for number in range(MAX_PHASES + 1)))

    with pytest.raises(InfraFault, match=f"more than {MAX_PHASES}") as raised:
        carry_out_eval(Held(claim))

    assert raised.value.code == "evaluator.crashed"
    assert len(node.started) == 2 * MAX_PHASES  # the untouched grading tells whose fault it is


def test_an_evaluator_that_asks_twice_for_the_same_is_at_fault(
    claim: Claim, node: Node, asks: Any
) -> None:
    asks(Phase(name="tests"), Phase(name="tests"))

    with pytest.raises(InfraFault, match="twice"):
        carry_out_eval(Held(claim))


def test_a_path_that_is_none_is_the_evaluators_fault(claim: Claim, node: Node, asks: Any) -> None:
    asks(Phase(name="tests", files={"relative": (b"", 0o644)}))

    with pytest.raises(InfraFault, match="cannot be carried out") as raised:
        carry_out_eval(Held(claim))

    assert raised.value.code == "evaluator.crashed"


def test_too_large_and_too_much_are_empty(
    claim: Claim, node: Node, asks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "COLLECTED_BYTES", 5)
    files = {f"/app/{name}": (b"1234", 0o644) for name in "abc"}
    asks(Phase(name="tests", files=files, collect={"/app/a": 3, "/app/b": 9, "/app/c": 9}))

    carry_out_eval(Held(claim))

    found = InTurn.seen[0].phases[0].files
    assert found == {"/app/a": b"", "/app/b": b"1234", "/app/c": b""}


@pytest.mark.parametrize(("wanted", "kind"), [(False, "none"), (True, "host")])
def test_a_grading_has_a_network_only_where_it_is_asked_for(
    wanted: bool, kind: str, claim: Claim, node: Node, asks: Any
) -> None:
    Environment.objects.update(network="host")
    asks(Phase(name="tests", network=wanted))

    carry_out_eval(Held(claim))

    assert [each.spec.network for each in node.started] == [kind]


def test_a_network_that_the_environment_does_not_grant_is_refused(
    claim: Claim, node: Node, asks: Any
) -> None:
    asks(Phase(name="tests", network=True))

    with pytest.raises(InfraFault, match="has none") as raised:
        carry_out_eval(Held(claim))

    assert (raised.value.code, raised.value.retryable) == ("evaluator.no_network", False)
    assert node.started == []


def test_a_phase_without_a_sandbox_is_refused(claim: Claim, node: Node, asks: Any) -> None:
    Rollout.objects.update(needs_sandbox=False)
    asks(Phase(name="tests"))

    with pytest.raises(InfraFault) as raised:
        carry_out_eval(Held(claim))

    assert (raised.value.code, raised.value.retryable) == ("evaluator.no_sandbox", False)


def test_the_score_says_by_what_it_was_made(claim: Claim, node: Node, asks: Any) -> None:
    asks()

    carry_out_eval(Held(claim))

    found = Evaluation.objects.get()
    assert (found.source, found.evaluator, found.evaluator_version) == ("rollout", "script", "1")
    assert len(found.settings_digest) == 64
    assert found.evidence_path.endswith(".evidence.json.gz")
