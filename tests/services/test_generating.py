# ruff: noqa: ARG002 - the adapters have the arguments of their protocol
"""Generating across updates: one turn of two versions, exact budgets, and the bound on lag.

The database, the store, the router and the pool are real; the server's answers are scripted.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import redis
from django.conf import settings as django_settings
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rollouts.handlers.base import PolicyLagExceeded
from rollouts.inference.exceptions import GenerationCancelled
from rollouts.inference.gate import PolicyGate
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.protocol import ChatAnswer, Generation, Health, Server
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.models import Policy, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services import server_control, servers
from rollouts.services.policy_gate import policy_gate
from rollouts.services.policy_updates import (
    abandon_update,
    begin_update,
    check_ready,
    complete_update,
)
from rollouts.services.routable import Routable
from rollouts.stages import generating, process
from rollouts.stages.generating import Generator
from rollouts.stages.lag import PolicyLagDrop
from rollouts.stages.lease import Held
from rollouts.stages.seeding import seed_of
from rollouts.stages.stamping import Asked, versions_of
from tests.services.line import bring_to, make_experiment, make_group, make_node

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.broker]

STOP = 99


class Scripted:
    """Sample 1, 2, 3 … one at a time, as far as it may before it is cut."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.tokens_before_cut = 3
        self.versions: list[tuple[int, int]] | None = None
        self.under_way = threading.Event()
        self.holds = False

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        return Health(True, "scripted")

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: Any,
        *,
        timeout_seconds: float,
        cancelled: Callable[[], bool],
        interrupted: Callable[[], bool],
        cache_salt: str | None = None,
    ) -> Generation:
        self.asked.append(
            {
                "prompt": list(prompt_ids),
                "max_tokens": sampling.max_tokens,
                "salt": cache_salt,
                "seed": sampling.seed,
            }
        )
        started = time.monotonic()
        count = sampling.max_tokens
        reason: Any = "length"
        if self.holds:
            self.under_way.set()
            while not interrupted():
                if cancelled():
                    raise GenerationCancelled("cancelled")
                time.sleep(0.01)
            count, reason = min(self.tokens_before_cut, count), "abort"
        first = len(prompt_ids)
        runs = tuple(self.versions or ())
        return Generation(
            tuple(range(first, first + count)),
            tuple(-0.1 for _ in range(count)),
            reason,
            runs[-1][0] if runs else None,
            server.id,
            time.monotonic() - started,
            "processed_logprobs",
            runs,
        )


class ScriptedChat(Scripted):
    """Answer with text; a cut one is cancelled, as servers of text are."""

    generate = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        del self.tokens_before_cut

    def chat(
        self,
        server: Server,
        messages: Any,
        tools: Any,
        sampling: Any,
        *,
        timeout_seconds: float,
        cancelled: Callable[[], bool],
    ) -> ChatAnswer:
        self.asked.append({"messages": list(messages)})
        if self.holds:
            self.under_way.set()
            while not cancelled():
                time.sleep(0.01)
            raise GenerationCancelled("cancelled")
        return ChatAnswer(ParsedTurn(content="hello"), "stop", server.id, 0.0)


@pytest.fixture
def adapter(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    """Return the adapter of kind `vllm`; the store is empty and its passes are known of."""
    settings.POLICY_GATE_LEASE_SECONDS = 60.0
    with redis.Redis.from_url(django_settings.BROKER_URL) as client:
        client.flushdb()
    policy_gate.cache_clear()
    process.router.cache_clear()
    scripted = Scripted()
    monkeypatch.setattr(generating, "adapters", lambda: {"vllm": scripted})
    monkeypatch.setattr(server_control, "control_for", lambda _kind: None)  # it does not tell
    yield scripted
    policy_gate.cache_clear()
    process.router.cache_clear()


def make_generator(*, seed: int | None = None, **experiment: Any) -> Generator:
    """Return the generator of a rollout that is in RUN, at policy version 0."""
    made = make_experiment(**experiment)
    servers.register_server(policy=made.policy, url="http://127.0.0.1:9")
    know(made.policy)
    group = make_group(experiment=made)
    rollout = Rollout.objects.get(group=group)
    claim = bring_to(rollout, "run", make_node())
    assert claim is not None
    rollout = Rollout.objects.select_related("experiment__policy").get(pk=rollout.pk)
    budgets = Budgets(inference_wait_seconds=30.0)
    return Generator(Held(claim), made.policy, Sampling(seed=seed), budgets, (STOP,), rollout)


def know(policy: Policy) -> None:
    """Have the store know of the policy's passes since long ago."""
    gate = policy_gate()
    gate.know(str(policy.pk))
    gate._redis.set(*gate._keys(str(policy.pk), "since"), 1)


def until_ready(policy: Policy) -> None:
    update = policy.updates.get(state__in=["quiescing", "ready"])
    deadline = time.monotonic() + 60
    while check_ready(update_id=update.pk).state != "ready":
        assert time.monotonic() < deadline, "the update is not ready"


def beside(work: Callable[[], Any]) -> "tuple[threading.Thread, list[Any]]":
    """Run some work in a thread; return it with where its result or exception will be."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def exchange(policy: Policy, adapter: Scripted, version: int = 1) -> None:
    """Cut what is under way, exchange the weights, and let it go on."""
    assert adapter.under_way.wait(timeout=30)
    begin_update(policy_id=policy.pk, version=version, mode="abort")
    until_ready(policy)
    adapter.holds = False
    complete_update(policy_id=policy.pk, number=policy.updates.count())


def test_a_turn_that_an_update_cut_goes_on_from_its_tokens(adapter: Scripted) -> None:
    generate = make_generator(seed=5)
    adapter.holds = True
    thread, results = beside(lambda: generate([1, 2], 8))

    exchange(generate.policy, adapter)
    thread.join(timeout=60)

    (turn,) = results
    assert (turn.token_ids, turn.finish_reason) == (tuple(range(2, 10)), "length")
    assert len(turn.logprobs) == 8
    assert turn.version_runs == ((0, 3), (1, 5))
    assert turn.policy_version == 1
    policy = generate.policy.pk.hex[:8]
    seeds = [seed_of(generate.rollout, 5), seed_of(generate.rollout, 5, offset=3)]
    assert adapter.asked == [
        {"prompt": [1, 2], "max_tokens": 8, "salt": f"{policy}-0", "seed": seeds[0]},
        {"prompt": [1, 2, 2, 3, 4], "max_tokens": 5, "salt": f"{policy}-1", "seed": seeds[1]},
    ]


def test_versions_that_the_server_tells_are_taken(adapter: Scripted) -> None:
    generate = make_generator()
    adapter.versions = [(7, 1), (8, 2)]

    turn = generate([1], 3)

    assert (turn.version_runs, turn.policy_version) == (((7, 1), (8, 2)), 8)


def test_a_cut_turn_that_had_ended_is_ended(adapter: Scripted) -> None:
    generate = make_generator()
    adapter.holds, adapter.tokens_before_cut = True, 1
    thread, results = beside(lambda: generate(list(range(STOP)), 8))

    exchange(generate.policy, adapter)
    thread.join(timeout=60)

    assert (results[0].token_ids, results[0].finish_reason) == ((STOP,), "stop")
    assert len(adapter.asked) == 1


def test_waiting_for_an_update_uses_no_budget(adapter: Scripted) -> None:
    generate = make_generator()
    began, left = generate.clock(), generate._wait_left()
    stage_left = generate.held.remaining_seconds()
    begin_update(policy_id=generate.policy.pk, version=1, mode="drain-calls")
    until_ready(generate.policy)
    thread, results = beside(lambda: generate([1], 2))
    entered = time.monotonic()
    while not generate.held_back:
        # Waits for what is counted only at the end of the wait: the gate opens after a second.
        if time.monotonic() - entered > 1.0 and generate.policy.updates.get().state == "ready":
            complete_update(policy_id=generate.policy.pk, number=1)
        assert time.monotonic() - entered < 60
        time.sleep(0.05)
    thread.join(timeout=60)

    assert results[0].policy_version == 1
    assert generate.held_back >= 0.9
    assert generate.clock() - began < time.monotonic() - entered - generate.held_back + 1.0
    assert left - generate._wait_left() < generate.held_back
    assert generate.held.remaining_seconds() > stage_left - (time.monotonic() - entered)


def test_the_end_of_the_agents_time_keeps_what_was_sampled(adapter: Scripted) -> None:
    generate = make_generator()
    adapter.holds = True
    generate.deadline = generate.clock() + 0.3

    turn = generate([1, 2], 8)

    assert (turn.token_ids, turn.finish_reason, turn.policy_version) == ((2, 3, 4), "abort", 0)


class Telling:
    """A server's control routes that only say which version it serves."""

    def __init__(self, version: int | None) -> None:
        self.version = version

    def weight_version(self, server: Server, *, timeout_seconds: float) -> int | None:
        return self.version


@pytest.mark.parametrize(("says", "stamp"), [(0, 0), (1, None), (None, None)])
def test_a_turn_cut_while_weights_are_exchanged_under_it(
    adapter: Scripted, monkeypatch: pytest.MonkeyPatch, says: int | None, stamp: int | None
) -> None:
    monkeypatch.setattr(server_control, "control_for", lambda _kind: Telling(says))
    generate = make_generator()
    adapter.holds = True
    thread, results = beside(lambda: generate([1, 2], 8))
    assert adapter.under_way.wait(timeout=30)

    begin_update(policy_id=generate.policy.pk, version=1, mode="none")
    generate.deadline = 0.0  # the agent's time ends
    thread.join(timeout=60)

    (turn,) = results
    assert (turn.token_ids, turn.finish_reason) == ((2, 3, 4), "abort")
    assert (turn.policy_version, turn.version_runs) == (stamp, ())
    assert generate.lag.oldest == 0, "the bound on lag counts them as the older ones"


@pytest.mark.parametrize("ends", ["complete", "abandon"])
def test_a_turn_cut_after_weights_were_exchanged_under_it(
    adapter: Scripted, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    generate = make_generator()
    adapter.holds = True
    thread, results = beside(lambda: generate([1, 2], 8))
    assert adapter.under_way.wait(timeout=30)

    begin_update(policy_id=generate.policy.pk, version=1, mode="none")
    end = complete_update if ends == "complete" else abandon_update
    end(policy_id=generate.policy.pk, number=1)
    generate.deadline = 0.0
    thread.join(timeout=60)

    (turn,) = results
    assert (turn.token_ids, turn.policy_version, turn.version_runs) == ((2, 3, 4), None, ())


def test_what_a_server_told_last_is_not_said_of_all_tokens_of_a_cut_turn(
    adapter: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = make_generator()
    known = generate._view.read(since=0.0)
    asked = Asked(0, known, lapsed=False)
    begin_update(policy_id=generate.policy.pk, version=1, mode="none")
    part = Generation((5, 6), (-0.1, -0.1), "abort", 1, known.servers[0].id, 0.1)

    def read() -> Routable:
        return generate._view.read(since=time.monotonic())

    assert versions_of(part, asked, read) == ((UNKNOWN_POLICY_VERSION, 2),)
    assert versions_of(replace(part, finish_reason="length"), asked, read) == (
        (UNKNOWN_POLICY_VERSION, 2),
    ), "nobody knows where in the turn the weights were exchanged"
    assert versions_of(replace(part, policy_version=0), asked, read) == ((0, 2),)


def test_a_request_that_was_not_counted_is_sampled_again(adapter: Scripted) -> None:
    generate = make_generator()
    adapter.holds = True
    thread, results = beside(lambda: generate([1, 2], 4))
    assert adapter.under_way.wait(timeout=30)
    gate = policy_gate()

    # The store takes the pass for a dead worker's, and the next renewal finds that out.
    (held,) = gate._keeper._held.values()
    gate._redis.zadd(*gate._keys(str(generate.policy.pk), "passes"), {held.token: 1})
    adapter.holds = False
    gate._keeper.look_after_now()
    thread.join(timeout=60)

    (turn,) = results
    assert (turn.token_ids, turn.policy_version) == ((2, 3, 4, 5), 0)
    assert [each["prompt"] for each in adapter.asked] == [[1, 2], [1, 2]]


def test_what_is_asked_while_a_request_runs_is_answered_from_memory(adapter: Scripted) -> None:
    generate = make_generator()
    adapter.holds = True
    thread, _results = beside(lambda: generate([1, 2], 8))
    assert adapter.under_way.wait(timeout=30)
    calls: list[object] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        CaptureQueriesContext(connection) as queries,
    ):
        patch.setattr(PolicyGate, "_call", lambda *asked, **_named: calls.append(asked))
        answers = [generate._interrupted() for _ in range(100)]

    generate.deadline = 0.0
    thread.join(timeout=60)
    assert answers == [False] * 100
    assert (len(queries), calls) == (0, [])


def test_cancel_while_an_update_holds_back(adapter: Scripted) -> None:
    generate = make_generator()
    begin_update(policy_id=generate.policy.pk, version=1, mode="drain-calls")
    generate.held.cause = "cancelled"

    with pytest.raises(GenerationCancelled):
        generate([1], 2)

    assert adapter.asked == []


@pytest.mark.parametrize("action", ["cut", "drop", "keep"])
def test_lag_beyond_the_bound(adapter: Scripted, action: str) -> None:
    generate = make_generator(max_policy_lag=1, on_policy_lag=action)
    assert generate([1], 2).policy_version == 0
    Policy.objects.filter(pk=generate.policy.pk).update(version=1)
    assert generate([1], 2).policy_version == 1
    Policy.objects.filter(pk=generate.policy.pk).update(version=2)

    if action == "keep":
        assert generate([1], 2).policy_version == 2
        assert not generate.lag.cut
        return
    with pytest.raises(PolicyLagExceeded if action == "cut" else PolicyLagDrop):
        generate([1], 2)

    assert generate.lag.cut is (action == "cut")
    assert len(adapter.asked) == 2


def test_a_turn_is_cut_where_it_would_lag(adapter: Scripted) -> None:
    generate = make_generator(max_policy_lag=0)
    adapter.holds = True
    thread, results = beside(lambda: generate([1, 2], 8))

    exchange(generate.policy, adapter)
    thread.join(timeout=60)

    assert (results[0].token_ids, results[0].finish_reason) == ((2, 3, 4), "abort")
    assert generate.lag.cut


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier-worker", "now"])
@pytest.mark.parametrize("action", ["cut", "drop", "keep"])
def test_tokens_of_an_unknown_version_cannot_keep_a_bound_on_lag(
    adapter: Scripted, action: str, earlier: bool
) -> None:
    generate = make_generator(max_policy_lag=5, on_policy_lag=action)
    generate.lag.unknown = earlier
    adapter.versions = [(UNKNOWN_POLICY_VERSION, 2)]
    if not earlier:
        assert generate([1], 2).policy_version is None

    if action == "keep":
        assert generate([1], 2).token_ids == (1, 2)
        generate.lag.drop_unknown()
        return
    with pytest.raises(PolicyLagExceeded if action == "cut" else PolicyLagDrop):
        generate([1], 2)
    if action == "drop":
        with pytest.raises(PolicyLagDrop, match="cannot be shown to keep max_policy_lag, which"):
            generate.lag.drop_unknown()

    assert generate.lag.cut is (action == "cut")
    assert len(adapter.asked) == (0 if earlier else 1)


def test_without_a_bound_tokens_of_an_unknown_version_are_sampled_on(adapter: Scripted) -> None:
    generate = make_generator(on_policy_lag="drop")
    generate.lag.unknown = True

    assert generate([1], 2).token_ids == (1, 2)
    generate.lag.drop_unknown()


def test_a_gate_that_the_store_kept_shut_is_opened_by_who_finds_it(adapter: Scripted) -> None:
    generate = make_generator()
    policy_gate().close(str(generate.policy.pk), str(uuid4()))

    assert generate([1], 2).policy_version == 0


def test_text_that_an_update_cut_is_asked_for_again(
    adapter: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ScriptedChat()
    monkeypatch.setattr(generating, "adapters", lambda: {"vllm": chat})
    generate = make_generator()
    Policy.objects.filter(pk=generate.policy.pk).update(tokenizer="")
    generate = Generator(
        generate.held,
        Policy.objects.get(pk=generate.policy.pk),
        generate.sampling,
        generate.budgets,
        (),
        generate.rollout,
    )
    chat.holds = True
    message = {"role": "user", "content": "hi"}
    thread, results = beside(lambda: generate.chat([message], [], 8))

    exchange(generate.policy, chat)
    thread.join(timeout=60)

    assert results[0].parsed.content == "hello"
    assert [each["messages"] for each in chat.asked] == [[message], [message]]
