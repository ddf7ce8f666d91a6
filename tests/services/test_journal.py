"""The journal of a stage: written under the lease, read back whole by the next worker."""

import pytest

from rollouts.exceptions import LeaseLost
from rollouts.handlers.base import Action
from rollouts.inference.protocol import Generation
from rollouts.models import JournalEntry, Rollout
from rollouts.services.reap import recover_attempts_of
from rollouts.stages.journal import StageJournal
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
