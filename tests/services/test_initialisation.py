"""INIT: a sandbox on what its setups left, or on a snapshot; setups run once on a node."""

from typing import Any

import pytest
from django.utils import timezone

from rollouts.exceptions import LeaseLost
from rollouts.models import Rollout, Task
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.stages import initialisation, network
from rollouts.stages.initialisation import carry_out_init
from rollouts.stages.lease import Held
from rollouts.stages.runner import as_fault
from rollouts.states import Stage
from sandboxes.models import Environment, Node, Sandbox, Snapshot
from sandboxes.runtime.exceptions import SetupFailed
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.services.node import sandbox_name, sandbox_prefix
from tests.services.line import (
    bring_to,
    claim_active,
    make_experiment,
    make_group,
    make_node,
    make_task,
)
from tests.services.race import together

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, settings: Any) -> FakeRuntime:
    """Return this node's runtime, on which a setup leaves a file with its text."""
    settings.NODE_NAME = "n1"
    settings.SANDBOX_RUNTIME = "fake"  # whose images are names
    made = FakeRuntime(sandbox_prefix())

    def run(sandbox: FakeSandbox, command: str, _stdin: bytes) -> Answer:
        if command.startswith("bash "):
            script = sandbox.files[command.removeprefix("bash ")][0].decode()
            sandbox.files[f"/left by {script}"] = (b"", 0o644)
            if script == "false":
                return Answer(output="it broke", exit_code=1)
        else:
            assert command == "rm -rf /setup"
            sandbox.files = {p: v for p, v in sandbox.files.items() if not p.startswith("/setup")}
        return Answer()

    made.script = run
    for module in (initialisation, network):
        monkeypatch.setattr(module, "node_runtime", lambda: made)
    return made


def make_prepared_task(*, environment: str = "make tools", task: str = "make data") -> Task:
    made = make_task()
    Environment.objects.filter(pk=made.environment_id).update(setup=environment)
    Task.objects.filter(pk=made.pk).update(payload={"setup": task})
    return Task.objects.get(pk=made.pk)


def carry_out(rollout: Rollout, workers: Any) -> Sandbox:
    """Carry out the rollout's INIT; return its sandbox."""
    claim = bring_to(rollout, "init", workers)
    assert claim is not None
    carry_out_init(Held(claim))
    return Sandbox.objects.get(owner=rollout.pk, purpose="run")


def files_of(runtime: FakeRuntime, sandbox: Sandbox) -> set[str]:
    return set(runtime.sandboxes[sandbox_name(sandbox.pk)].files)


def setups(runtime: FakeRuntime) -> int:
    return sum(method == "freeze" for method, _name in runtime.calls)


def test_a_sandbox_lies_on_what_its_setups_left(runtime: FakeRuntime) -> None:
    workers = make_node("n1")
    group = make_group(task=make_prepared_task())
    rollout = group.rollouts.get()

    sandbox = carry_out(rollout, workers)

    rollout.refresh_from_db()
    assert (rollout.state, sandbox.state) == ("run", "ready")
    assert files_of(runtime, sandbox) == {"/left by make tools", "/left by make data"}
    spec = runtime.sandboxes[sandbox_name(sandbox.pk)].spec
    assert sandbox.layers == list(spec.layers)
    assert [set(runtime.layers.merged((each,))) for each in sandbox.layers] == [
        {"/left by make tools", "/left by make data"},
        {"/left by make tools"},
    ]
    assert SandboxHandle.from_dict(sandbox.handle).name == sandbox_name(sandbox.pk)
    assert setups(runtime) == 2
    assert runtime.list() == [sandbox_name(sandbox.pk)]


def test_the_next_rollouts_run_no_setup_but_what_differs(runtime: FakeRuntime) -> None:
    workers = make_node("n1")
    first = make_prepared_task()
    other = Task.objects.create(
        task_set=first.task_set,
        ref="other",
        environment=first.environment,
        instruction="Do it.",
        content_hash="1" * 64,
        payload={"setup": "make more"},
    )
    one = carry_out(make_group(task=first).rollouts.get(), workers)

    two = carry_out(make_group(task=first).rollouts.get(), workers)
    assert (two.layers, setups(runtime)) == (one.layers, 2)
    three = carry_out(make_group(task=other).rollouts.get(), workers)

    assert (three.layers[1], setups(runtime)) == (one.layers[1], 3)
    assert files_of(runtime, three) == {"/left by make tools", "/left by make more"}


def test_without_setups_there_are_no_layers(runtime: FakeRuntime) -> None:
    sandbox = carry_out(make_group().rollouts.get(), make_node("n1"))

    assert (sandbox.layers, setups(runtime)) == ([], 0)


def test_a_group_of_a_snapshot_starts_on_it_and_runs_no_setup(runtime: FakeRuntime) -> None:
    workers = make_node("n1")
    experiment = make_experiment()
    task = make_prepared_task()
    parent = carry_out(make_group(experiment=experiment, task=task).rollouts.get(), workers)
    handle = SandboxHandle.from_dict(parent.handle)
    runtime.write_file(handle, "/app/made", b"by the agent")
    snapshot = Snapshot.objects.create(
        owner=parent.owner,
        environment=Environment.objects.get(pk=task.environment_id),
        state="ready",
        turn=1,
        node=Node.objects.get(name="n1"),
        layers=[runtime.snapshot(handle), *parent.layers],
        ready_at=timezone.now(),
    )
    request = GroupRequest(task=task.pk, samples=1, snapshot=snapshot.pk)
    (group,) = submit_groups(experiment=experiment, requests=[request])

    child = carry_out(group.rollouts.get(), workers)

    assert child.layers == snapshot.layers
    assert len(child.layers) == 3
    assert files_of(runtime, child) == {"/left by make tools", "/left by make data", "/app/made"}
    assert setups(runtime) == 2


def test_a_setup_that_fails_is_a_fault_that_tells_its_output(runtime: FakeRuntime) -> None:
    workers = make_node("n1")
    rollout = make_group(task=make_prepared_task(task="false")).rollouts.get()

    with pytest.raises(SetupFailed) as failed:
        carry_out(rollout, workers)

    fault = as_fault(failed.value, stage=Stage.INIT)
    assert str(fault) == "The task's setup ended with 1: it broke"
    assert (fault.code, fault.retryable, fault.timed_out) == ("sandbox.setup_failed", True, False)
    assert setups(runtime) == 1  # the environment's stays for the next try
    rollout.refresh_from_db()
    assert rollout.state == "init"
    assert Sandbox.objects.get(owner=rollout.pk).state == "starting"


def test_a_sandbox_that_was_given_up_meanwhile_does_not_stay(runtime: FakeRuntime) -> None:
    workers = make_node("n1")
    rollout = make_group(task=make_prepared_task()).rollouts.get()
    claim = bring_to(rollout, "init", workers)
    assert claim is not None
    run = runtime.script

    def give_up_then_run(sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
        Sandbox.objects.filter(owner=rollout.pk).update(state="stopping")
        return run(sandbox, command, stdin)

    runtime.script = give_up_then_run

    with pytest.raises(LeaseLost, match="was given up"):
        carry_out_init(Held(claim))

    assert runtime.list() == []
    assert Sandbox.objects.get(owner=rollout.pk).layers == []


def test_rollouts_of_one_group_at_once_run_its_setups_once(runtime: FakeRuntime) -> None:
    workers = make_node("n1", capacity=8)
    group = make_group(task=make_prepared_task(), samples=8)
    first, *rest = group.rollouts.order_by("sample")
    claims = [bring_to(first, "init", workers)]
    for rollout in rest:
        claims.append(claim_active(rollout, workers["init"]))

    answers = together(*[lambda claim=claim: carry_out_init(Held(claim)) for claim in claims])

    assert answers == [None] * 8
    assert setups(runtime) == 2
    sandboxes = Sandbox.objects.filter(owner__in=[each.pk for each in group.rollouts.all()])
    assert len({tuple(each.layers) for each in sandboxes}) == 1
    assert runtime.list() == sorted(sandbox_name(each.pk) for each in sandboxes)


def test_an_environments_setup_sees_no_variable_of_a_task(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_prepared_task()
    variables = {"BASH_ENV": "$(cat /secret)"}
    Task.objects.filter(pk=task.pk).update(payload={**task.payload, "env": variables})
    seen: list[tuple[str, bool, bool]] = []
    run_program = runtime.exec

    def watch(handle: SandboxHandle, argv: Any, **options: Any) -> Any:
        if argv[0] == "bash":
            script = runtime.sandboxes[handle.name].files[argv[1]][0].decode()
            own = "BASH_ENV" in runtime.sandboxes[handle.name].spec.env
            seen.append((script, own, "BASH_ENV" in (options.get("env") or {})))
        return run_program(handle, argv, **options)

    monkeypatch.setattr(runtime, "exec", watch)

    sandbox = carry_out(Rollout.objects.get(group=make_group(task=task)), make_node())

    assert seen == [("make tools", False, False), ("make data", False, True)]
    assert dict(runtime.sandboxes[sandbox_name(sandbox.pk)].spec.env) == variables
