"""The journal of a stage: written under the lease, read back whole by the next worker."""

import json
from dataclasses import replace

import pytest

from rollouts.exceptions import LeaseLost
from rollouts.handlers.base import Action
from rollouts.inference.protocol import Generation
from rollouts.models import JournalEntry, Rollout
from rollouts.services.reap import recover_attempts_of
from rollouts.services.snapshots import ask_for_snapshot
from rollouts.stages.journal import MAX_SHELL_BYTES, StageJournal, bounded
from sandboxes.runtime.sessions import ShellState
from tests.services.line import bring_to, claim_active, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)


def sampled(*ids: int) -> Generation:
    return Generation(
        token_ids=ids,
        logprobs=tuple(-0.5 for _ in ids),
        finish_reason="stop",
        policy_version=3,
        server_id="s",
        seconds=0.25,
        logprob_mode="processed",
    )


def test_the_next_worker_reads_every_turn_and_the_shell_back() -> None:
    workers = make_node()
    make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    journal = StageJournal(claim)
    command = Action(kind="command", text="ls")
    said = ({"role": "user", "content": "x"},)
    state = ShellState(cwd="/app", exports="declare -x A=1")

    journal.record_sampled(0, sampled(4, 5), (1, 2, 3), command)
    journal.record_observed(0, said, state)
    journal.record_sampled(1, sampled(8), (1, 2, 3, 4, 5, 6, 7), command)
    journal.record_observed(1, said, state)
    journal.record_sampled(2, sampled(9), (42,), command)
    recover_attempts_of(worker_id=workers["run"].worker_id)
    following = StageJournal(claim_active(Rollout.objects.get(), make_node()["run"]))

    turns = following.replay()
    assert [turn.prompt_ids for turn in turns] == [(1, 2, 3), (1, 2, 3, 4, 5, 6, 7), (42,)]
    assert [turn.generation for turn in turns] == [sampled(4, 5), sampled(8), sampled(9)]
    assert [turn.messages for turn in turns] == [said, said, None]
    assert following.shell_state == state
    stored = list(JournalEntry.objects.filter(kind="sampled").values_list("body", flat=True))
    assert [body["prompt_adds"] for body in stored] == [[1, 2, 3], [6, 7], [42]]
    rollout = Rollout.objects.get()
    assert (rollout.turns, rollout.sampled_tokens) == (3, 4)


def shells() -> list[object]:
    """Return what was written of the shell, in order."""
    bodies = JournalEntry.objects.filter(kind="observed").order_by("id")
    return [body["shell"] for body in bodies.values_list("body", flat=True)]


def test_the_shell_is_written_where_it_changed_and_the_next_workers_get_the_last() -> None:
    workers = make_node()
    make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    journal = StageJournal(claim)
    first, second = (ShellState(cwd=cwd, exports="declare -x A=1") for cwd in ("/a", "/b"))

    for turn, state in enumerate([None, first, first, second, None, second]):
        journal.record_sampled(turn, sampled(4), (1,), Action(kind="command", text="ls"))
        journal.record_observed(turn, (), state)
    recover_attempts_of(worker_id=workers["run"].worker_id)
    following = StageJournal(claim_active(Rollout.objects.get(), make_node()["run"]))

    assert following.shell_state == second
    following.record_observed(6, (), second)
    following.record_observed(7, (), first)
    written = [None, first.as_dict(), None, second.as_dict(), None, None, None, first.as_dict()]
    assert shells() == written
    assert following.shell_state == first


def test_a_large_shell_is_written_in_part_once_and_read_back() -> None:
    workers = make_node()
    make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    journal = StageJournal(claim)
    large = ShellState(cwd="/a", exports="declare -x A=1", functions="f" * MAX_SHELL_BYTES)
    told = []
    journal.after_turn = lambda _turns, state: told.append(state)
    ask_for_snapshot(rollout=Rollout.objects.get(), turn=2)

    journal.record_sampled(0, sampled(4), (1,), Action(kind="command", text="ls"))
    for turn in range(2):
        journal.record_observed(turn, (), large)
    recover_attempts_of(worker_id=workers["run"].worker_id)
    following = StageJournal(claim_active(Rollout.objects.get(), make_node()["run"]))

    kept = ShellState(cwd="/a", exports="declare -x A=1")
    assert shells() == [kept.as_dict(), None]
    assert following.shell_state == kept
    assert told == [large]


PARTS = ("functions", "aliases", "options", "exports")


@pytest.mark.parametrize(
    ("large", "dropped"),
    [
        ((), ()),
        (("functions",), PARTS[:1]),
        (("aliases",), PARTS[:2]),
        (("options",), PARTS[:3]),
        (("exports",), PARTS),
        (("functions", "exports"), PARTS),
        (("cwd",), PARTS),
    ],
)
def test_parts_are_dropped_in_order_until_the_rest_fits(
    large: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    whole = {name: "x" * (MAX_SHELL_BYTES if name in large else 9) for name in ("cwd", *PARTS)}

    kept = bounded(ShellState(**whole)).as_dict()

    assert kept == whole | dict.fromkeys(dropped, "")


def test_a_shell_that_fits_to_the_byte_is_kept_whole() -> None:
    frame = len(json.dumps(ShellState(cwd="/", exports="").as_dict()))
    fits = ShellState(cwd="/", exports="x" * (MAX_SHELL_BYTES - frame))

    assert bounded(fits) == fits
    assert bounded(replace(fits, exports=fits.exports + "x")) == ShellState(cwd="/", exports="")


def test_a_worker_that_lost_its_lease_cannot_write() -> None:
    workers = make_node()
    make_group()
    claim = bring_to(Rollout.objects.get(), "run", workers)
    assert claim is not None
    journal = StageJournal(claim)
    recover_attempts_of(worker_id=workers["run"].worker_id)

    with pytest.raises(LeaseLost):
        journal.record_sampled(0, sampled(1), (1,), Action(kind="command", text="ls"))

    assert JournalEntry.objects.count() == 0
