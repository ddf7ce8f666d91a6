"""Snapshots: asked for, taken after a turn, failed with the episode, started from on their node."""

import uuid
from collections import Counter
from typing import Any

import pytest
from django.utils import timezone

from rollouts.exceptions import InvalidValue, StateConflict, UnknownReference
from rollouts.models import Group, Rollout
from rollouts.services.cancel import cancel_rollout, stop_experiment
from rollouts.services.claim import Claim
from rollouts.services.dispatch import dispatch
from rollouts.services.end import end_rollout
from rollouts.services.finish import finish_run
from rollouts.services.journal import Step, append_step
from rollouts.services.snapshots import ask_for_snapshot, delete_snapshot
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.stages.journal import StageJournal
from sandboxes.models import Node, Sandbox, Snapshot
from sandboxes.runtime.exceptions import FileFault, SandboxGone
from sandboxes.runtime.fake import FakeRuntime
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import ShellState
from sandboxes.services import snapshots
from sandboxes.services.catalogue import save_environment, save_image
from sandboxes.services.snapshots import take_due_snapshots
from tests.services.line import (
    bring_to,
    make_experiment,
    make_group,
    make_node,
    make_task,
    run_result,
)
from tests.services.race import together, while_open

pytestmark = pytest.mark.django_db(transaction=True)

PREPARED = "prepared-" + "0" * 32


@pytest.fixture
def runtime() -> FakeRuntime:
    """Return this node's runtime: one prepared layer is there."""
    made = FakeRuntime()
    made.layers.keep(PREPARED, {"/set-up": (b"", 0o644)}, ())
    return made


@pytest.fixture
def running(settings: Any) -> tuple[Rollout, Claim]:
    """Return a rollout in RUN on this node, and the claim of its worker."""
    settings.NODE_NAME = "n1"
    workers = make_node("n1")
    make_group()
    rollout = Rollout.objects.get()
    claim = bring_to(rollout, "run", workers)
    assert claim is not None
    return Rollout.objects.get(), claim


def start(runtime: FakeRuntime, rollout: Rollout) -> tuple[Sandbox, SandboxHandle]:
    """Start the rollout's sandbox on the prepared layer; it holds one file of its own."""
    spec = SandboxSpec(name="s", image="base", layers=(PREPARED,))
    handle = runtime.start(spec, timeout_seconds=60)
    runtime.write_file(handle, "/made", b"by the agent")
    sandbox = Sandbox.objects.get(owner=rollout.pk)
    sandbox.layers = [PREPARED]
    sandbox.save()
    return sandbox, handle


def take(runtime: FakeRuntime, started: tuple[Sandbox, SandboxHandle], turn: int) -> int:
    sandbox, handle = started
    return take_due_snapshots(
        sandbox=sandbox, runtime=runtime, handle=handle, turn=turn, workdir="/app/src"
    )


def ready_snapshot(rollout: Rollout, node: Node, **columns: Any) -> Snapshot:
    """Return a snapshot that was taken of a rollout's sandbox."""
    return Snapshot.objects.create(
        **{
            "owner": rollout.pk,
            "environment": rollout.environment,
            "state": "ready",
            "turn": 1,
            "node": node,
            "layers": ["layer-" + "1" * 32],
            "ready_at": timezone.now(),
            **columns,
        }
    )


def state_of(snapshot: Snapshot) -> tuple[str, int | None, str]:
    snapshot.refresh_from_db()
    return snapshot.state, snapshot.turn, snapshot.detail


def test_the_state_after_a_turn_and_after_the_next_one_is_kept(
    runtime: FakeRuntime, running: tuple[Rollout, Claim]
) -> None:
    rollout, _claim = running
    started = start(runtime, rollout)
    second, soon = ask_for_snapshot(rollout=rollout, turn=2), ask_for_snapshot(rollout=rollout)
    assert (state_of(second), state_of(soon)) == (("requested", 2, ""), ("requested", None, ""))

    assert take(runtime, started, 1) == 1

    assert (state_of(second), state_of(soon)) == (("requested", 2, ""), ("ready", 1, ""))
    top, below = soon.layers
    assert below == PREPARED
    assert set(runtime.layers.merged((top,))) == {"/set-up", "/made"}
    assert (soon.workdir, soon.environment, soon.owner) == (
        "/app/src",
        rollout.environment,
        rollout.pk,
    )
    assert soon.node == Node.objects.get(name="n1")
    assert soon.ready_at is not None
    assert runtime.alive(started[1])

    assert take(runtime, started, 2) == 1
    assert state_of(second) == ("ready", 2, "")
    assert second.layers[0] != top
    assert take(runtime, started, 3) == 0


def test_another_rollouts_snapshots_are_not_due(
    runtime: FakeRuntime, running: tuple[Rollout, Claim]
) -> None:
    rollout, _claim = running
    other = make_group().rollouts.get()
    asked = ask_for_snapshot(rollout=other)

    assert take(runtime, start(runtime, rollout), 1) == 0
    assert state_of(asked) == ("requested", None, "")


def test_the_journal_tells_a_turn_whose_snapshot_is_due_once_it_is_written(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, claim = running
    ask_for_snapshot(rollout=make_group().rollouts.get())  # another's
    ask_for_snapshot(rollout=rollout, turn=1)
    ask_for_snapshot(rollout=rollout, turn=3)
    journal = StageJournal(claim)
    told: list[Any] = []

    def note(turns: int, state: ShellState | None) -> None:
        with pytest.raises(StateConflict, match=f"Turn {turns} is done already"):
            ask_for_snapshot(rollout=rollout, turn=turns)
        told.append((turns, None if state is None else state.cwd))

    journal.after_turn = note
    journal.record_observed(0, [], None)
    Snapshot.objects.filter(turn=1).update(state="failed")
    journal.record_observed(1, [], None)
    journal.record_observed(2, [], ShellState(cwd="/x", exports=""))

    assert told == [(1, None), (3, "/x")]


@pytest.mark.parametrize("turn", [None, 1])
def test_what_is_asked_for_while_the_journal_waits_for_the_row_is_due(
    running: tuple[Rollout, Claim], turn: int | None
) -> None:
    rollout, claim = running

    _asked, due = while_open(
        lambda: ask_for_snapshot(rollout=rollout, turn=turn),
        lambda: append_step(claim=claim, step=Step(0, "observed", {"messages": []})),
    )

    assert due is True


def test_a_copy_that_fails_is_written_down_and_the_next_is_taken(
    runtime: FakeRuntime, running: tuple[Rollout, Claim]
) -> None:
    rollout, _claim = running
    started = start(runtime, rollout)
    asked = [ask_for_snapshot(rollout=rollout, turn=1) for _ in range(2)]
    runtime.fail_next("snapshot", FileFault("the disk is full"))

    assert take(runtime, started, 1) == 1

    found = sorted(state_of(each) for each in asked)
    assert found == [("failed", 1, "sandbox.file_fault: the disk is full"), ("ready", 1, "")]
    assert runtime.alive(started[1])


def test_a_sandbox_that_is_gone_fails_the_snapshot_only(
    runtime: FakeRuntime, running: tuple[Rollout, Claim]
) -> None:
    rollout, _claim = running
    started = start(runtime, rollout)
    asked = ask_for_snapshot(rollout=rollout)
    runtime.stop("s")

    assert take(runtime, started, 1) == 0
    assert state_of(asked) == ("failed", None, f"{SandboxGone.code}: sandbox s no longer runs")


def test_what_was_deleted_while_it_was_copied_leaves_no_layer(
    running: tuple[Rollout, Claim],
) -> None:
    class Slow(FakeRuntime):
        def snapshot(self, handle: SandboxHandle) -> str:
            assert delete_snapshot(snapshot_id=asked.pk)
            return super().snapshot(handle)

    rollout, _claim = running
    runtime = Slow()
    runtime.layers.keep(PREPARED, {}, ())
    started = start(runtime, rollout)
    asked = ask_for_snapshot(rollout=rollout)

    assert take(runtime, started, 1) == 0

    assert runtime.list_layers() == []
    assert not Snapshot.objects.exists()


def test_a_turn_that_is_done_is_too_late_and_the_next_is_not(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, claim = running
    journal = StageJournal(claim)
    journal.record_observed(0, [], None)
    journal.record_observed(1, [], None)

    for turn in (1, 2):
        with pytest.raises(StateConflict, match=f"Turn {turn} is done already") as late:
            ask_for_snapshot(rollout=rollout, turn=turn)
        assert late.value.code == "snapshot.too_late"
    assert not Snapshot.objects.exists()
    assert ask_for_snapshot(rollout=rollout, turn=3).state == "requested"


@pytest.mark.parametrize("state", ["eval", "done"])
def test_an_episode_that_is_over_gives_none(settings: Any, state: str) -> None:
    workers = make_node("n1")
    rollout = make_group().rollouts.get()
    bring_to(rollout, state, workers)

    with pytest.raises(StateConflict, match="The episode is over") as late:
        ask_for_snapshot(rollout=rollout)  # as it was when the caller read it

    assert late.value.code == "snapshot.too_late"
    assert not Snapshot.objects.exists()


def test_a_rollout_without_a_sandbox_has_none() -> None:
    rollout = make_group(task=make_task(sandbox=False)).rollouts.get()

    with pytest.raises(StateConflict) as none:
        ask_for_snapshot(rollout=rollout)

    assert none.value.code == "snapshot.no_sandbox"


def test_a_rollout_has_a_bounded_number_whoever_asks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "MAX_PER_OWNER", 2)
    rollout, other = (make_group().rollouts.get() for _ in range(2))
    failed = ask_for_snapshot(rollout=rollout)
    Snapshot.objects.filter(pk=failed.pk).update(state="failed")

    answers = together(*[lambda: ask_for_snapshot(rollout=rollout)] * 5)

    refused = [each for each in answers if isinstance(each, InvalidValue)]
    assert [str(each) for each in refused] == ["A rollout has at most 2 snapshots."] * 3
    assert Snapshot.objects.filter(owner=rollout.pk, state="requested").count() == 2
    assert ask_for_snapshot(rollout=other).state == "requested"


def test_the_end_of_an_episode_fails_what_was_asked_for_and_keeps_what_is_ready(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, claim = running
    node = Node.objects.get(name="n1")
    ready, asked = ready_snapshot(rollout, node), ask_for_snapshot(rollout=rollout, turn=9)
    other = ask_for_snapshot(rollout=make_group().rollouts.get())

    finish_run(claim=claim, result=run_result())

    assert state_of(asked) == ("failed", 9, "The episode ended after 2 turns.")
    assert (state_of(ready), state_of(other)) == (("ready", 1, ""), ("requested", None, ""))


def test_whatever_ends_a_rollout_fails_what_was_asked_for() -> None:
    ends = "The rollout ended before that turn was done."
    cancelled, stopped, ended = (make_group().rollouts.get() for _ in range(3))
    asked = [ask_for_snapshot(rollout=each, turn=3) for each in (cancelled, stopped, ended)]

    cancel_rollout(rollout_id=cancelled.pk)
    assert stop_experiment(experiment_id=stopped.experiment_id) == 1
    assert end_rollout(rollout_id=ended.pk, outcome="infra_failed", failure_code="x")

    assert [state_of(each) for each in asked] == [("failed", 3, ends)] * 3


def test_asking_and_ending_at_once_leaves_nothing_asked_for_at_an_ended_rollout() -> None:
    first, second = (make_group().rollouts.get() for _ in range(2))

    asked, ended = while_open(
        lambda: ask_for_snapshot(rollout=first), lambda: cancel_rollout(rollout_id=first.pk)
    )
    assert not isinstance(ended, Exception), ended
    assert state_of(asked)[0] == "failed"

    _ended, late = while_open(
        lambda: cancel_rollout(rollout_id=second.pk), lambda: ask_for_snapshot(rollout=second)
    )
    assert isinstance(late, StateConflict)
    assert not Snapshot.objects.filter(owner=second.pk).exists()


def test_groups_of_a_snapshot_start_on_its_node_only(running: tuple[Rollout, Claim]) -> None:
    rollout, _claim = running
    make_node("n2", capacity=8)
    snapshot = ready_snapshot(rollout, Node.objects.get(name="n1"))
    request = GroupRequest(task=rollout.group.task_id, samples=5, snapshot=snapshot.pk)
    (group,) = submit_groups(experiment=rollout.experiment, requests=[request])
    assert Group.objects.get(pk=group.pk).snapshot == snapshot

    assert dispatch() == 3  # one of the node's four slots is the parent's

    places = Rollout.objects.filter(group=group).values_list("state", "node__name")
    assert Counter(places) == {("init", "n1"): 3, ("queued", None): 2}


def test_what_waits_for_its_snapshots_node_does_not_hold_up_the_rest(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, _claim = running
    Node.objects.filter(name="n1").update(capacity=1)
    make_node("n2", capacity=2)
    snapshot = ready_snapshot(rollout, Node.objects.get(name="n1"))
    request = GroupRequest(task=rollout.group.task_id, samples=40, priority=5, snapshot=snapshot.pk)
    (waiting,) = submit_groups(experiment=rollout.experiment, requests=[request])
    other = make_group(experiment=rollout.experiment, samples=3)

    assert dispatch() == 2

    assert set(waiting.rollouts.values_list("state", flat=True)) == {"queued"}
    places = Counter(other.rollouts.values_list("state", "node__name"))
    assert places == {("init", "n2"): 2, ("queued", None): 1}


def submit_from(rollout: Rollout, snapshot: uuid.UUID) -> None:
    """Submit two groups of the rollout's task: a plain one, and one from a snapshot."""
    task = rollout.group.task_id
    submit_groups(
        experiment=rollout.experiment,
        requests=[GroupRequest(task=task), GroupRequest(task=task, snapshot=snapshot)],
    )


def test_a_snapshot_that_is_not_there_not_ready_or_anothers_is_unknown(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, _claim = running
    node = Node.objects.get(name="n1")
    stranger = make_group(
        experiment=make_experiment(owner="mallory"), task=rollout.group.task
    ).rollouts.get()
    foreign = ready_snapshot(stranger, node)
    asked = ask_for_snapshot(rollout=rollout)
    failed = ready_snapshot(rollout, node, state="failed")
    orphan = ready_snapshot(rollout, node, owner=uuid.uuid4())
    before = Group.objects.count()

    for wrong in (foreign.pk, asked.pk, failed.pk, orphan.pk, uuid.uuid4()):
        with pytest.raises(UnknownReference) as unknown:
            submit_from(rollout, wrong)
        assert str(unknown.value) == f"groups[1]: there is no snapshot {wrong} that is ready."
        assert unknown.value.code == "snapshot.unknown"

    assert Group.objects.count() == before
    submit_from(stranger, foreign.pk)
    assert Group.objects.count() == before + 2


def test_a_snapshot_of_equal_sandboxes_may_have_another_agent(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, _claim = running
    source = save_environment(
        name="source",
        image=rollout.environment.image,
        agent="tools",
        tools=["bash"],
        limits={"memory_bytes": 1},
    )
    snapshot = ready_snapshot(rollout, Node.objects.get(name="n1"), environment=source)

    submit_from(rollout, snapshot.pk)

    assert Group.objects.get(snapshot=snapshot).environment == rollout.environment


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"setup": "touch /x"}, "setup"),
        ({"workdir": "/src", "network": "host"}, "workdir, network"),
        ({"network": "allow_list", "egress_hosts": ["a.example"]}, "network, egress_hosts"),
        ({"gpu": "nvidia"}, "gpu"),
        ({"image": "other"}, "image"),
    ],
)
def test_a_snapshot_of_other_sandboxes_is_refused(
    running: tuple[Rollout, Claim], values: dict[str, Any], names: str
) -> None:
    rollout, _claim = running
    image = save_image(name=values.pop("image", "base"), source="base")
    source = save_environment(name="source", image=image, **values)
    snapshot = ready_snapshot(rollout, Node.objects.get(name="n1"), environment=source)
    before = Group.objects.count()

    with pytest.raises(InvalidValue) as refused:
        submit_from(rollout, snapshot.pk)

    assert str(refused.value) == (
        "groups[1]: the snapshot was made in source@1, which differs from the task's environment "
        f"{rollout.environment.ref} in {names}; they must be equal."
    )
    assert Group.objects.count() == before


def test_a_snapshot_that_groups_start_from_stays(running: tuple[Rollout, Claim]) -> None:
    rollout, _claim = running
    node = Node.objects.get(name="n1")
    used, unused = ready_snapshot(rollout, node), ready_snapshot(rollout, node)
    submit_from(rollout, used.pk)

    assert delete_snapshot(snapshot_id=used.pk) is False
    assert delete_snapshot(snapshot_id=unused.pk) is True
    assert delete_snapshot(snapshot_id=unused.pk) is True
    assert list(Snapshot.objects.all()) == [used]
    Group.objects.filter(snapshot=used).update(state="cancelled")
    assert delete_snapshot(snapshot_id=used.pk) is True
    assert not Group.objects.filter(snapshot__isnull=False).exists()


def test_a_snapshot_is_deleted_or_started_from_whoever_is_first(
    running: tuple[Rollout, Claim],
) -> None:
    rollout, _claim = running
    node = Node.objects.get(name="n1")
    used, deleted = ready_snapshot(rollout, node), ready_snapshot(rollout, node)

    answers = while_open(
        lambda: submit_from(rollout, used.pk), lambda: delete_snapshot(snapshot_id=used.pk)
    )
    assert answers == (None, False)

    gone, refused = while_open(
        lambda: delete_snapshot(snapshot_id=deleted.pk), lambda: submit_from(rollout, deleted.pk)
    )
    assert gone is True
    assert isinstance(refused, UnknownReference)
    assert list(Snapshot.objects.all()) == [used]
    assert Group.objects.filter(snapshot__isnull=False).count() == 1
