# ruff: noqa: ARG002 - the steered server has the arguments of its protocol
"""Updates of policies on a real database and a real store: certain, once, and never stuck."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.conf import settings as django_settings
from django.utils import timezone

from rollouts.exceptions import RolloutError, StateConflict
from rollouts.inference.exceptions import ControlRefused
from rollouts.inference.gate import Pass, PolicyGate, Shut
from rollouts.inference.protocol import Server
from rollouts.models import Attempt, Policy, PolicyUpdate, Rollout
from rollouts.services import policy_updates, server_control
from rollouts.services.claim import claim_attempt
from rollouts.services.dispatch import dispatch
from rollouts.services.finish import finish_init
from rollouts.services.policy_gate import policy_gate
from rollouts.services.policy_updates import (
    abandon_update,
    advance_updates,
    begin_update,
    check_ready,
    complete_update,
    held_seconds,
)
from rollouts.services.reap import reap
from rollouts.services.server_control import ServerAnswer
from rollouts.services.servers import register_server
from tests.services.line import (
    active_attempt,
    bring_to,
    claim_active,
    make_experiment,
    make_group,
    make_node,
)
from tests.services.race import together

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.broker]
LEASE = 60.0
DEAD_WORKERS_LEASE = 0.2


@pytest.fixture
def store() -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(django_settings.BROKER_URL) as client:
        client.flushdb()
        yield client


@pytest.fixture
def gate(
    store: "redis.Redis", settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PolicyGate]:
    """Return the gates with a lease that does not end within a test."""
    settings.POLICY_GATE_LEASE_SECONDS = LEASE
    policy_gate.cache_clear()
    yield policy_gate()
    policy_gate.cache_clear()


@pytest.fixture
def policy(gate: PolicyGate) -> Policy:
    """Return a policy whose passes the store has known of for long enough."""
    policy = make_experiment().policy
    gate.know(str(policy.pk))
    let_a_lease_pass(gate, policy)
    return policy


def let_a_lease_pass(gate: PolicyGate, policy: Policy) -> None:
    """Have the store believe that it has known of all passes since 1970."""
    gate._redis.set(*gate._keys(str(policy.pk), "since"), 1)


def begin(policy: Policy, mode: str = "drain-calls", version: int = 1, **more: Any) -> PolicyUpdate:
    return begin_update(policy_id=policy.pk, version=version, mode=mode, **more)


def enter(gate: PolicyGate, policy: Policy, token: str = "t") -> Pass:
    entered = gate.enter(str(policy.pk), token)
    assert isinstance(entered, Pass)
    return entered


def until(state: str, update: PolicyUpdate) -> PolicyUpdate:
    """Return the update once it is in a state; fails after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = check_ready(update_id=update.pk)
        if found.state == state:
            return found
    raise AssertionError(f"the update stays {found.state}: {found.detail}")


def test_drain_calls_waits_for_what_is_inside_and_lets_nobody_in(
    policy: Policy, gate: PolicyGate
) -> None:
    inside = enter(gate, policy)

    update = begin(policy)

    assert gate.enter(str(policy.pk), "late") == Shut(str(update.pk))
    waiting = check_ready(update_id=update.pk)
    assert (waiting.state, waiting.detail) == ("quiescing", "1 generations are under way.")
    gate.leave(inside)
    assert check_ready(update_id=update.pk).state == "ready"
    done = complete_update(policy_id=policy.pk, number=1)
    assert (done.state, done.released_at is not None) == ("completed", True)
    policy.refresh_from_db()
    assert policy.version == 1
    assert enter(gate, policy).epoch == 1


def test_a_worker_that_died_inside_holds_up_an_update_for_a_lease_only(
    policy: Policy, gate: PolicyGate
) -> None:
    namespace = f"prorl:{django_settings.DEPLOYMENT}"
    short = PolicyGate(gate._redis, namespace, lease_seconds=DEAD_WORKERS_LEASE)
    dead = enter(short, policy)
    short._keeper.drop(dead)  # with its process died what renews it
    update = begin(policy, "abort")

    assert until("ready", update).state == "ready"

    gate.renew([dead])
    assert dead.lapsed  # it was counted no longer, so its tokens are of no version


def test_a_flushed_store_does_not_make_an_update_ready(
    policy: Policy, gate: PolicyGate, store: "redis.Redis"
) -> None:
    inside = enter(gate, policy)
    update = begin(policy)
    store.flushdb()

    found = check_ready(update_id=update.pk)

    assert found.state == "quiescing"
    assert gate.enter(str(policy.pk), "late") == Shut(str(update.pk))
    gate.renew([inside])
    assert check_ready(update_id=update.pk).detail == "1 generations are under way."
    gate.leave(inside)
    assert not inside.lapsed
    assert check_ready(update_id=update.pk).state == "quiescing"
    let_a_lease_pass(gate, policy)
    assert check_ready(update_id=update.pk).state == "ready"


def test_the_next_round_closes_the_gate_that_the_store_forgot(
    policy: Policy, gate: PolicyGate, store: "redis.Redis"
) -> None:
    update = begin(policy)
    assert check_ready(update_id=update.pk).state == "ready"
    store.flushdb()

    assert advance_updates() == 1

    assert gate.enter(str(policy.pk), "late") == Shut(str(update.pk))


def test_a_restart_after_the_end_was_written_opens_the_gate(
    policy: Policy, gate: PolicyGate
) -> None:
    update = begin(policy)
    # The process that completed it died between its commit and the store.
    PolicyUpdate.objects.filter(pk=update.pk).update(state="completed", ended_at=timezone.now())
    assert gate.enter(str(policy.pk), "early") == Shut(str(update.pk))

    advance_updates()

    assert isinstance(gate.enter(str(policy.pk), "next"), Pass)
    assert PolicyUpdate.objects.get().released_at is not None
    assert advance_updates() == 0


def test_one_of_two_begins_wins(policy: Policy) -> None:
    results = together(lambda: begin(policy, version=1), lambda: begin(policy, version=2))

    assert {type(each) for each in results} == {StateConflict, PolicyUpdate}
    refused = next(each for each in results if isinstance(each, StateConflict))
    assert refused.code == "policy.update_open"
    assert PolicyUpdate.objects.count() == 1


def test_completing_at_once_and_again_is_completing_once(policy: Policy) -> None:
    update = begin(policy, version=4)
    check_ready(update_id=update.pk)

    def complete() -> str:
        return complete_update(policy_id=policy.pk, number=1).state

    assert together(complete, complete) == ["completed", "completed"]
    assert complete() == "completed"
    policy.refresh_from_db()
    assert policy.version == 4
    with pytest.raises(StateConflict) as refused:
        abandon_update(policy_id=policy.pk, number=1)
    assert refused.value.code == "policy.update_ended"


def test_abandoning_keeps_the_version_and_opens_the_gate(policy: Policy, gate: PolicyGate) -> None:
    inside = enter(gate, policy)
    begin(policy)

    for _ in range(2):
        ended = abandon_update(policy_id=policy.pk, number=1, why="no weights")
        assert (ended.state, ended.detail) == ("abandoned", "no weights")

    policy.refresh_from_db()
    assert policy.version == 0
    assert isinstance(gate.enter(str(policy.pk), "next"), Pass)
    with pytest.raises(StateConflict) as refused:
        complete_update(policy_id=policy.pk, number=1)
    assert refused.value.code == "policy.update_ended"
    gate.leave(inside)
    assert begin(policy).number == 2


def test_complete_before_ready_is_refused(policy: Policy, gate: PolicyGate) -> None:
    enter(gate, policy)
    begin(policy)

    with pytest.raises(StateConflict) as refused:
        complete_update(policy_id=policy.pk, number=1)

    assert refused.value.code == "policy.update_not_ready"
    policy.refresh_from_db()
    assert policy.version == 0


@pytest.mark.parametrize("version", [0, 3])
def test_the_version_rises(policy: Policy, version: int) -> None:
    Policy.objects.filter(pk=policy.pk).update(version=3)

    with pytest.raises(StateConflict) as refused:
        begin(policy, version=version)

    assert refused.value.code == "policy.version_not_newer"
    assert not PolicyUpdate.objects.exists()


def test_control_needs_the_operators_word(policy: Policy) -> None:
    with pytest.raises(RolloutError) as refused:
        begin(policy, control=True)

    assert (refused.value.code, refused.value.status) == ("policy.control_not_allowed", 403)
    assert not PolicyUpdate.objects.exists()


def test_none_is_ready_at_once_and_holds_back_nothing(policy: Policy, gate: PolicyGate) -> None:
    assert begin(policy, "none").state == "ready"

    assert isinstance(gate.enter(str(policy.pk), "next"), Pass)


def test_drain_rollouts_holds_back_starts_and_waits_for_those_begun(policy: Policy) -> None:
    workers = make_node()
    begun, in_init, queued = (
        make_group(experiment=make_experiment()).rollouts.get() for _ in range(3)
    )
    Rollout.objects.filter(pk__in=[in_init.pk, queued.pk]).update(not_before=in_an_hour())
    bring_to(begun, "run", workers)
    Rollout.objects.filter(pk=in_init.pk).update(not_before=None)
    init_claim = bring_to(in_init, "init", workers)
    assert init_claim is not None
    update = begin(policy, "drain-rollouts")
    Rollout.objects.filter(pk=queued.pk).update(not_before=None)

    assert dispatch() == 0
    finish_init(claim=init_claim)
    held = active_attempt(in_init)
    assert (held.stage, claim_attempt(attempt_id=held.pk, worker=workers["run"])) == ("run", None)
    assert check_ready(update_id=update.pk).detail == "1 rollouts are running."

    Attempt.objects.filter(rollout=begun, stage="run").update(
        state="finished", ended_at=timezone.now()
    )
    assert check_ready(update_id=update.pk).state == "ready"
    complete_update(policy_id=policy.pk, number=1)
    assert claim_active(in_init, workers["run"]).rollout_id == in_init.pk
    assert dispatch() == 1


def test_time_that_an_update_held_back_is_no_ones_budget(policy: Policy) -> None:
    workers = make_node()
    rollout = make_group(experiment=make_experiment()).rollouts.get()
    claim = bring_to(rollout, "run", workers)
    assert claim is not None
    now = timezone.now()
    long_ago = now - timedelta(hours=20)
    Attempt.objects.filter(pk=claim.attempt_id).update(started_at=long_ago)
    update = begin(policy)
    PolicyUpdate.objects.filter(pk=update.pk).update(created_at=long_ago)

    assert reap().overdue == 0
    complete_at = now - timedelta(hours=10)
    PolicyUpdate.objects.filter(pk=update.pk).update(
        state="abandoned", ended_at=complete_at, opened_at=complete_at, released_at=complete_at
    )
    spent = held_seconds(policy_id=policy.pk, since=long_ago + timedelta(hours=1), until=now)
    assert spent == 9 * 3600
    assert reap().overdue == 1


def test_servers_that_say_another_version_are_named(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = policy_updates.versions(policy=policy, expected=1)
    assert wrong == []
    answers = [
        ServerAnswer(str(uuid4()), "http://a", 0, "says version 0", False),
        ServerAnswer(str(uuid4()), "http://b", None, "not told", True),
    ]
    monkeypatch.setattr(policy_updates, "versions", lambda **_: answers)
    begin(policy)

    with pytest.raises(StateConflict, match="http://a says version 0") as refused:
        complete_update(policy_id=policy.pk, number=1)

    assert refused.value.code == "policy.version_mismatch"
    kept = PolicyUpdate.objects.get()
    assert (kept.state, [each["said"] for each in kept.servers]) == (
        "ready",
        ["says version 0", "not told"],
    )


class Steered:
    """A server that notes how it is steered, and refuses to be resumed as often as told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusals = 0

    def pause(self, server: Server, *, abort: bool, timeout_seconds: float) -> None:
        self.calls.append(f"pause abort={abort}")

    def resume(self, server: Server, *, timeout_seconds: float) -> None:
        self.calls.append("resume")
        if self.refusals:
            self.refusals -= 1
            raise ControlRefused("not now")

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        return 1

    def flush_cache(self, server: Server, *, timeout_seconds: float) -> None:
        self.calls.append("flush")


def test_control_pauses_flushes_and_resumes_until_it_worked(
    policy: Policy, gate: PolicyGate, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.POLICY_CONTROL = True
    steered = Steered()
    monkeypatch.setattr(server_control, "control_for", lambda _kind: steered)
    register_server(policy=policy, url="http://127.0.0.1:9")
    update = begin(policy, "abort", control=True)
    assert check_ready(update_id=update.pk).state == "quiescing"

    advance_updates()
    assert PolicyUpdate.objects.get().state == "ready"
    assert steered.calls == ["pause abort=True"]

    steered.refusals = 1
    done = complete_update(policy_id=policy.pk, number=1)
    assert steered.calls[1:] == ["flush", "resume"]
    assert (done.state, done.released_at) == ("completed", None)
    assert done.detail == "Cannot resume http://127.0.0.1:9: not now"
    advance_updates()
    assert steered.calls[3:] == ["resume"]
    released = PolicyUpdate.objects.get()
    assert (released.released_at is not None, released.detail) == (True, "")
    assert advance_updates() == 0


def in_an_hour() -> Any:
    return timezone.now() + timedelta(hours=1)
