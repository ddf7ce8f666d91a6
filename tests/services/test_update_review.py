# ruff: noqa: ARG002 - the steered servers have the arguments of their protocol
"""Updates when things go wrong around them: lost stores, cleared and deaf servers, late pauses.

The database, the store, the router and the pool are real; the servers' answers are scripted.
"""

import threading
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection
from django.utils import timezone

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.handlers.base import PolicyLagExceeded
from rollouts.inference.exceptions import ServerUnreachable
from rollouts.inference.gate import Pass, Shut
from rollouts.inference.logprob_probe import LogprobProbe
from rollouts.inference.protocol import Generation, Health, Server
from rollouts.models import Experiment, InferenceServer, Policy, PolicyUpdate
from rollouts.services import policy_pauses, server_control, servers
from rollouts.services.policies import update_policy
from rollouts.services.policy_gate import policy_gate
from rollouts.services.policy_updates import (
    abandon_update,
    advance_updates,
    begin_update,
    complete_update,
    held_seconds,
)
from rollouts.services.routable import routable_servers
from rollouts.stages import generating
from rollouts.stages.generating import Generator
from rollouts.stages.lag import PolicyLagDrop
from rollouts.stages.stamping import Partial, within_lag
from rollouts.states import ExperimentState
from tests.services.test_generating import (
    Scripted,
    ScriptedChat,
    adapter,
    beside,
    know,
    make_generator,
    until_ready,
)

__all__ = ["adapter"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.broker]
FIRST, SECOND = "http://127.0.0.1:9", "http://127.0.0.1:10"


class Steered:
    """Servers that note how they are steered; those named `deaf` are not reached."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.deaf: set[str] = set()
        self.pausing = threading.Event()
        self.may_pause = threading.Event()
        self.may_pause.set()
        self.version: int | None = None

    def _reach(self, server: Server) -> None:
        if server.url in self.deaf:
            raise ServerUnreachable("nobody answers")

    def pause(self, server: Server, *, abort: bool, timeout_seconds: float) -> None:
        self.pausing.set()
        assert self.may_pause.wait(timeout=60)
        self._reach(server)
        self.calls.append(("pause", server.url))

    def resume(self, server: Server, *, timeout_seconds: float) -> None:
        self._reach(server)
        self.calls.append(("resume", server.url))

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        return self.version

    def flush_cache(self, server: Server, *, timeout_seconds: float) -> None:
        self._reach(server)


@pytest.fixture
def steered(adapter: Scripted, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Steered:
    settings.POLICY_CONTROL = True
    control = Steered()
    monkeypatch.setattr(server_control, "control_for", lambda _kind: control)
    monkeypatch.setattr(servers, "control_for", lambda _kind: control)
    return control


def begin(policy: Policy, mode: str, version: int = 1, **more: Any) -> PolicyUpdate:
    return begin_update(policy_id=policy.pk, version=version, mode=mode, **more)


def ready(policy: Policy, mode: str) -> PolicyUpdate:
    update = begin(policy, mode)
    until_ready(policy)
    return update


def lose_the_store() -> None:
    with redis.Redis.from_url(django_settings.BROKER_URL) as client:
        client.flushdb()


def kinds(control: Steered) -> list[str]:
    return [kind for kind, _url in control.calls]


def test_servers_cleared_during_an_update_do_not_open_its_gate(adapter: Scripted) -> None:
    generate = make_generator()
    policy = generate.policy
    update = ready(policy, "drain-calls")
    generate._begin_call()
    assert generate._sample([1], Partial(), 2) is None
    assert generate._shut_by == str(update.pk)
    servers.clear_servers(policies=[policy])

    found = routable_servers(policy=policy, since=time.monotonic())
    generate._open_left_shut()

    assert (found.servers, found.update, found.version) == ((), (update.pk, "drain-calls"), 0)
    assert policy_gate().enter(str(policy.pk), "t") == Shut(str(update.pk))


@pytest.mark.parametrize(("mode", "has_server"), [("abort", True), ("none", False)])
def test_waiting_without_a_server_is_the_updates(
    adapter: Scripted, mode: str, has_server: bool
) -> None:
    generate = make_generator()
    ready(generate.policy, mode)
    if not has_server:
        servers.clear_servers(policies=[generate.policy])
    before = generate._wait_left()
    thread, results = beside(lambda: generate([1], 2))
    entered = time.monotonic()
    while time.monotonic() - entered < 0.6:  # the wait that is to be counted
        assert thread.is_alive()
        thread.join(timeout=0.1)
    servers.register_server(policy=generate.policy, url=FIRST)
    complete_update(policy_id=generate.policy.pk, number=1)
    thread.join(timeout=60)

    assert (results[0].token_ids, results[0].policy_version) == ((1, 2), 1)
    assert generate.held_back >= 0.5
    assert before - generate._wait_left() < generate.held_back


def test_who_queues_for_a_slot_leaves_the_queue_when_an_update_begins(adapter: Scripted) -> None:
    generate = make_generator()
    begin(generate.policy, "drain-calls")
    routable_servers(policy=generate.policy, since=time.monotonic())

    assert generate._interrupted()
    generate._turnstile._began = time.monotonic()  # as within a request, which may end
    assert not generate._interrupted()


def test_a_store_that_lost_its_data_lets_nobody_into_a_ready_update(adapter: Scripted) -> None:
    generate = make_generator()
    update = ready(generate.policy, "drain-calls")
    lose_the_store()
    generate._begin_call()

    assert generate._sample([1], Partial(), 2) is None

    assert (generate._shut_by, adapter.asked) == (str(update.pk), [])
    assert policy_gate().inside(str(generate.policy.pk)) == 0


def test_a_store_learns_the_epoch_only_from_who_is_inside(adapter: Scripted) -> None:
    gate = policy_gate()
    held = gate.enter("policy", "t")
    assert isinstance(held, Pass)
    assert held.epoch is None

    lose_the_store()
    gate.tell(held, 3)
    again = gate.enter("policy", "u")
    assert isinstance(again, Pass)
    assert again.epoch is None
    gate.tell(again, 3)
    gate.tell(again, 2)
    last = gate.enter("policy", "v")
    assert isinstance(last, Pass)
    assert last.epoch == 3
    for each in (held, again, last):
        gate.leave(each)


def test_complete_is_refused_while_somebody_is_inside(adapter: Scripted) -> None:
    generate = make_generator()
    ready(generate.policy, "drain-calls")
    lose_the_store()
    inside = policy_gate().enter(str(generate.policy.pk), "t")
    assert isinstance(inside, Pass)

    with pytest.raises(StateConflict, match="1 generations are under way") as refused:
        complete_update(policy_id=generate.policy.pk, number=1)

    assert refused.value.code == "policy.update_not_quiet"
    assert Policy.objects.get(pk=generate.policy.pk).version == 0
    policy_gate().leave(inside)
    know(generate.policy)
    assert complete_update(policy_id=generate.policy.pk, number=1).state == "completed"


@pytest.mark.parametrize("action", ["cut", "drop", "keep"])
def test_a_turn_whose_own_tokens_span_too_many_versions(adapter: Scripted, action: str) -> None:
    generate = make_generator(max_policy_lag=0, on_policy_lag=action)
    adapter.versions = [(0, 1), (5, 2)]

    if action == "drop":
        with pytest.raises(PolicyLagDrop):
            generate([1], 3)
        return
    turn = generate([1], 3)

    kept = 1 if action == "cut" else 3
    assert (len(turn.token_ids), len(turn.logprobs)) == (kept, kept)
    assert turn.finish_reason == ("abort" if action == "cut" else "length")
    assert generate.lag.cut is (action == "cut")


def test_a_turn_that_lags_from_its_first_token_is_none(adapter: Scripted) -> None:
    generate = make_generator(max_policy_lag=1)
    generate.lag.oldest = 0
    adapter.versions = [(2, 3)]

    with pytest.raises(PolicyLagExceeded):
        generate([1], 3)

    assert generate.lag.cut


@pytest.mark.parametrize(
    ("runs", "before", "kept"),
    [
        ([(0, 2), (1, 3)], (None, None), 5),
        ([(0, 2), (2, 3)], (None, None), 2),
        ([(-1, 2), (2, 3)], (1, 1), 5),
        ([(2, 2), (0, 3)], (None, None), 2),
        ([(3, 2)], (1, 2), 0),
        ([], (0, 0), 0),
    ],
)
def test_tokens_within_a_lag_of_one(
    runs: list[tuple[int, int]], before: tuple[int | None, int | None], kept: int
) -> None:
    assert within_lag(runs, 1, before) == kept


def test_a_server_that_could_not_be_paused_leaves_no_other_paused(steered: Steered) -> None:
    policy = make_generator().policy
    servers.register_server(policy=policy, url=SECOND)
    steered.deaf = {SECOND}
    update = begin(policy, "abort", control=True)
    advance_updates()
    assert ("pause", FIRST) in steered.calls
    abandon_update(policy_id=policy.pk, number=1)

    assert ("resume", FIRST) in steered.calls
    update.refresh_from_db()
    assert (update.released_at, update.opened_at is not None) == (None, True)
    assert update.detail == f"Cannot resume {SECOND}: nobody answers"
    PolicyUpdate.objects.update(
        ended_at=timezone.now() - timedelta(seconds=policy_pauses.GIVE_UP_SECONDS + 1)
    )
    advance_updates()
    update.refresh_from_db()
    assert (update.released_at is not None, update.pauses) == (True, [])
    assert update.detail == f"Gave up resuming {SECOND}: nobody answers"


def test_a_pause_that_arrives_after_the_end_is_undone(steered: Steered) -> None:
    policy = make_generator().policy
    steered.may_pause.clear()
    update = begin(policy, "abort", control=True)
    thread, _results = beside(advance_updates)
    assert steered.pausing.wait(timeout=60)

    abandon_update(policy_id=policy.pk, number=1)
    update.refresh_from_db()
    assert update.released_at is None
    steered.may_pause.set()
    thread.join(timeout=60)
    advance_updates()

    assert kinds(steered)[-2:] == ["pause", "resume"]
    update.refresh_from_db()
    assert (update.released_at is not None, update.paused_at) == (True, None)


def test_the_next_update_resumes_what_could_not_be_resumed(steered: Steered) -> None:
    policy = make_generator().policy
    begin(policy, "abort", control=True)
    advance_updates()
    steered.deaf = {FIRST}
    complete_update(policy_id=policy.pk, number=1)
    begin(policy, "none", version=2)
    advance_updates()
    assert [len(each.pauses) for each in PolicyUpdate.objects.order_by("number")] == [0, 1]

    steered.deaf = set()
    complete_update(policy_id=policy.pk, number=2)

    assert kinds(steered) == ["pause", "resume"]
    assert not PolicyUpdate.objects.unreleased().exists()


@pytest.mark.parametrize("state", ["draining", "removed"])
def test_a_server_that_left_meanwhile_is_resumed_too(steered: Steered, state: str) -> None:
    policy = make_generator().policy
    begin(policy, "abort", control=True)
    advance_updates()
    InferenceServer.objects.update(state=state)

    complete_update(policy_id=policy.pk, number=1)

    assert kinds(steered) == ["pause", "resume"]


def test_time_counts_as_held_until_the_gate_opened(steered: Steered) -> None:
    policy = make_generator().policy
    begin(policy, "abort", control=True)
    advance_updates()
    steered.deaf = {FIRST}
    complete_update(policy_id=policy.pk, number=1)
    update = PolicyUpdate.objects.get()
    assert (update.released_at, update.opened_at is not None) == (None, True)
    assert update.opened_at is not None

    later = update.opened_at + timedelta(hours=1)
    since = update.opened_at + timedelta(minutes=1)

    assert held_seconds(policy_id=policy.pk, since=since, until=later) == 0
    assert (
        held_seconds(policy_id=policy.pk, since=update.created_at, until=later)
        == (update.opened_at - update.created_at).total_seconds()
    )


def make_chat(monkeypatch: pytest.MonkeyPatch) -> tuple[Generator, ScriptedChat]:
    chat = ScriptedChat()
    monkeypatch.setattr(generating, "adapters", lambda: {"vllm": chat})
    made = make_generator()
    Policy.objects.filter(pk=made.policy.pk).update(tokenizer="")
    policy = Policy.objects.get(pk=made.policy.pk)
    return Generator(made.held, policy, made.sampling, made.budgets, (), made.rollout), chat


def test_the_end_of_the_agents_time_within_a_chat(
    adapter: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, chat = make_chat(monkeypatch)
    chat.holds = True
    began = generate.clock()
    generate.deadline = began + 0.3

    answer = generate.chat([{"role": "user", "content": "hi"}], [], 8)

    assert (answer.finish_reason, answer.parsed.content) == ("abort", "")
    assert generate.clock() >= generate.deadline, "the time of the request is the agent's"
    assert len(chat.asked) == 1


def test_a_call_cut_in_the_queue_is_not_charged_with_the_one_before(adapter: Scripted) -> None:
    generate = make_generator()
    generate([1], 2)
    generate._turnstile._seconds = 100.0
    generate._begin_call()

    generate._measured(lambda: Generation((), (), "abort", None, "", 0.0))

    assert generate._call_seconds == 0.0


def test_control_of_a_mode_that_lets_requests_run_is_refused(steered: Steered) -> None:
    policy = make_generator().policy

    with pytest.raises(InvalidValue, match="mode 'none'"):
        begin(policy, "none", control=True)

    assert not PolicyUpdate.objects.exists()


def test_complete_asks_a_draining_server_too(steered: Steered) -> None:
    policy = make_generator().policy
    InferenceServer.objects.update(state="draining")
    begin(policy, "none")
    steered.version = 0

    with pytest.raises(StateConflict) as refused:
        complete_update(policy_id=policy.pk, number=1)

    assert refused.value.code == "policy.version_mismatch"
    assert [each["url"] for each in PolicyUpdate.objects.get().servers] == [FIRST]


class Well:
    """An adapter whose servers are well, and that notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Server] = []

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        self.asked.append(server)
        return Health(True, "serves it")


def test_a_server_with_another_version_gets_no_requests(
    steered: Steered, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_generator().policy
    monkeypatch.setattr(servers, "adapters", lambda: {"vllm": Well()})
    steered.version = 7

    assert servers.check_servers() == 1

    found = routable_servers(policy=policy, since=time.monotonic())
    assert (found.servers, found.version) == ((), 0)
    row = InferenceServer.objects.get()
    assert (row.told_version, row.detail) == (
        7,
        "tells version 7, the policy is at 0: no requests; serves it",
    )
    steered.version = 0
    servers.check_servers()
    assert len(routable_servers(policy=policy, since=time.monotonic()).servers) == 1


def test_nothing_is_sampled_for_a_check_while_weights_are_exchanged(
    steered: Steered, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_generator().policy
    well = Well()
    monkeypatch.setattr(servers, "adapters", lambda: {"vllm": well})
    begin(policy, "drain-calls")
    steered.version = 1

    servers.check_servers()

    assert [each.held for each in well.asked] == [True]
    assert InferenceServer.objects.get().told_version is None
    probed = LogprobProbe().add_mode(
        pytest.fail, well.asked[0], Health(True, "well"), advice="", timeout_seconds=1.0
    )
    assert probed == Health(True, "well")


def test_the_salt_of_the_prefix_cache_never_repeats(adapter: Scripted) -> None:
    generate = make_generator()
    policy = generate.policy
    generate([1], 2)
    begin(policy, "none")
    abandon_update(policy_id=policy.pk, number=1)
    generate([1], 2)
    update_policy(policy_id=policy.pk, version=9)
    generate([1], 2)
    Experiment.objects.update(state=ExperimentState.STOPPED)  # else only a rewind goes back
    update_policy(policy_id=policy.pk, version=0)
    generate([1], 2)
    update_policy(policy_id=policy.pk, version=0)
    generate([1], 2)

    salts = [each["salt"].removeprefix(f"{policy.pk.hex[:8]}-") for each in adapter.asked]
    assert salts == ["0", "1", "2", "3", "3"]


def test_an_older_process_can_still_insert_during_an_upgrade(adapter: Scripted) -> None:
    policy = make_generator().policy
    experiment = Experiment.objects.get()
    new = {"rollouts_policy": "weights_epoch", "rollouts_experiment": "on_policy_lag"}
    with connection.cursor() as cursor:
        for table, row in (("rollouts_policy", policy.pk), ("rollouts_experiment", experiment.pk)):
            cursor.execute(
                "SELECT column_name FROM information_schema.columns "
                "WHERE table_name = %s AND column_name NOT IN ('id', 'name', %s)",
                [table, new[table]],
            )
            old = ", ".join(name for (name,) in cursor.fetchall())
            cursor.execute(
                f"INSERT INTO {table} (id, name, {old}) "
                f"SELECT %s, 'by an older process', {old} FROM {table} WHERE id = %s",
                [uuid4(), row],
            )

    assert Policy.objects.get(name="by an older process").weights_epoch == 0
    assert Experiment.objects.get(name="by an older process").on_policy_lag == "cut"
