"""Rewards put together from several evaluators."""

from __future__ import annotations

from typing import Any

import pytest

from evaluators.base import (
    Artefacts,
    EvaluatorFault,
    InvalidSettings,
    PhaseResult,
    Score,
    UnknownEvaluator,
)
from evaluators.composite import CompositeEvaluator
from evaluators.registry import get_evaluator

COMPOSITE = CompositeEvaluator()
FORM = {"evaluator": "regex", "name": "form", "settings": {"pattern": r"^<answer>(.*)</answer>$"}}
RIGHT = {"evaluator": "regex", "name": "right", "settings": {"pattern": r"\d+"}}


def score(
    children: list[dict[str, Any]],
    text: str = "<answer>42</answer>",
    payload: dict[str, Any] | None = None,
    tokens: int = 0,
    turns: int = 0,
    **settings: Any,
) -> Score:
    """Score a text after checking the settings, as the child process does."""
    whole = {"children": children, **settings}
    COMPOSITE.validate(whole, payload or {})
    artefacts = Artefacts(answer=text, tokens=tokens, turns=turns)
    return COMPOSITE.score(whole, payload or {}, artefacts)


def test_the_weighted_sum() -> None:
    result = score([{**FORM, "weight": 0.25}, {**RIGHT, "weight": 0.5}])
    assert (result.reward, result.details["weighted"]) == (0.75, {"form": 0.25, "right": 0.5})
    assert dict(result.rewards) == {
        "reward": 0.75,
        "form": 1.0,
        "form.accuracy": 1.0,
        "right": 1.0,
        "right.accuracy": 1.0,
    }
    assert result.log == "[form] found '42'\n[right] found '42'"


@pytest.mark.parametrize(
    ("text", "reward", "closed"),
    [("<answer>42</answer>", 1.0, []), ("42", 0.0, ["form"]), ("<answer>x</answer>", 0.0, [])],
)
def test_a_closed_gate_takes_all(text: str, reward: float, closed: list[str]) -> None:
    result = score([{**FORM, "gate": 1}, RIGHT], text)
    assert (result.reward, result.details["closed_gates"]) == (reward, closed)


def test_the_reward_behind_a_closed_gate_is_declared() -> None:
    assert score([{**FORM, "gate": 1}, RIGHT], "42", gate_reward=-1).reward == -1.0


def test_a_gate_pays_only_where_it_has_a_weight() -> None:
    assert score([{**FORM, "gate": 1}, RIGHT]).reward == 1.0
    assert score([{**FORM, "gate": 1, "weight": 0.5}, RIGHT]).reward == 1.5


def test_the_reward_is_clipped() -> None:
    result = score([{**RIGHT, "weight": 5}], low=-1, high=2)
    assert (result.reward, result.details["before_clipping"]) == (2.0, 5.0)
    assert score([{**RIGHT, "weight": -5}], low=-1).reward == -1.0


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (800, 0.0), (850, -0.25), (900, -0.5), (1000, -1.0), (5000, -1.0)],
)
def test_the_soft_punishment_of_overlong_answers(tokens: int, penalty: float) -> None:
    result = score([RIGHT], tokens=tokens, length={"max": 1000, "buffer": 200})
    assert (result.rewards["length_penalty"], result.reward) == (penalty, 1 + penalty)


def test_without_a_buffer_the_punishment_is_a_step() -> None:
    assert score([RIGHT], tokens=999, length={"max": 1000, "penalty": 0.5}).reward == 1.0
    assert score([RIGHT], tokens=1001, length={"max": 1000, "penalty": 0.5}).reward == 0.5


@pytest.mark.parametrize(("turns", "penalty"), [(0, 0.0), (5, 0.0), (7, -0.5), (50, -1.0)])
def test_turns_beyond_the_free_ones_cost(turns: int, penalty: float) -> None:
    whole = {"children": [RIGHT], "turns": {"free": 5, "penalty": 0.25}}
    COMPOSITE.validate(whole, {})
    result = COMPOSITE.score(whole, {}, Artefacts(answer="1", turns=turns))
    assert (result.rewards["turn_penalty"], result.reward) == (penalty, 1 + penalty)


def test_each_child_gets_its_own_payload() -> None:
    children = [
        {"evaluator": "exact", "name": "one"},
        {"evaluator": "exact", "name": "two", "payload": {"answer": "42"}},
    ]
    assert score(children, "42", {"answer": "41"}).rewards["one"] == 0.0
    assert score(children, "42", {"answer": "41"}).rewards["two"] == 1.0
    both = {"children": {"one": {"answer": "42"}, "two": {"answer": "43"}}}
    assert (score(children, "42", both).rewards["one"], score(children, "42", both).reward) == (
        1.0,
        2.0,
    )


def test_a_childs_fault_is_the_wholes() -> None:
    script = {"evaluator": "script", "name": "tests"}
    settings = {"children": [RIGHT, script]}
    with pytest.raises(EvaluatorFault, match=r"^tests: "):
        COMPOSITE.score(settings, {}, Artefacts(answer="42"))


def test_phases_of_the_children_run_one_after_the_other() -> None:
    children = [RIGHT, {"evaluator": "script", "name": "a"}, {"evaluator": "script", "name": "b"}]
    settings = {"children": children}
    assert COMPOSITE.wants_sandbox(settings)
    assert not COMPOSITE.wants_sandbox({"children": [RIGHT]})
    own = get_evaluator("script").next_phase({}, {}, Artefacts())
    assert own is not None

    done: list[PhaseResult] = []
    names = []
    while len(names) < 5:
        phase = COMPOSITE.next_phase(settings, {}, Artefacts(phases=tuple(done)))
        if phase is None:
            break
        names.append(phase.name)
        assert phase.commands == own.commands
        done.append(PhaseResult(name=phase.name))

    assert names == [f"a/{own.name}", f"b/{own.name}"]


def test_rewards_of_turns_are_summed_by_weight() -> None:
    rules = [{"rule": "well_formed"}]
    process = {"evaluator": "process", "settings": {"rules": rules}, "weight": 0.5}
    settings = {"children": [process, RIGHT]}
    messages = ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"})
    result = COMPOSITE.score(settings, {}, Artefacts(answer="1", messages=messages, turns=2))
    assert (result.turn_rewards, result.reward) == ((0.5, 0.5), 1.5)
    assert COMPOSITE.wants_messages(settings)


def nested(depth: int) -> dict[str, Any]:
    inner = RIGHT if depth == 1 else nested(depth - 1)
    return {"evaluator": "composite", "settings": {"children": [inner]}}


def test_composites_nest_but_not_without_end() -> None:
    assert score([nested(2)]).reward == 1.0
    with pytest.raises(InvalidSettings, match="nest at most 3 deep"):
        score([nested(3)])


def test_large_details_of_children_are_left_out() -> None:
    big = {"evaluator": "exact", "settings": {"source": "answer"}}
    children = [{**big, "name": f"c{number}"} for number in range(16)]
    result = score(children, "\U0001f600" * 5000, {"answer": "x"})
    assert result.details["children"]["c0"]["left_out_bytes"] > 2048


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "children"),
        ({"children": []}, "children"),
        ({"children": [1]}, "object"),
        ({"children": [RIGHT] * 17}, "children"),
        ({"children": [RIGHT, RIGHT]}, "'right'"),
        ({"children": [{**RIGHT, "wieght": 1}]}, "wieght"),
        ({"children": [{**RIGHT, "weight": "1"}]}, "weight"),
        ({"children": [{**RIGHT, "gate": True}]}, "gate"),
        ({"children": [{**RIGHT, "name": "reward"}]}, "name"),
        ({"children": [{**RIGHT, "name": "a/b"}]}, "name"),
        ({"children": [{**RIGHT, "settings": []}]}, "settings"),
        ({"children": [{"evaluator": "regex"}]}, "regex: regex: neither"),
        ({"children": [RIGHT], "length": {"buffer": 1}}, "max"),
        ({"children": [RIGHT], "length": {"max": 10, "buffer": 11}}, "buffer"),
        ({"children": [RIGHT], "length": 5}, "length"),
        ({"children": [RIGHT], "turns": {"penalty": -1}}, "penalty"),
        ({"children": [RIGHT], "low": 1, "high": 0}, "low"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        COMPOSITE.validate(settings, {})
    assert (COMPOSITE.wants_sandbox(settings), COMPOSITE.wants_messages(settings)) == (False, False)


def test_an_unknown_child_is_named() -> None:
    with pytest.raises(UnknownEvaluator, match="vibes"):
        score([{"evaluator": "vibes"}])


def test_a_payload_for_nobody_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="'other'"):
        score([RIGHT], payload={"children": {"other": {}}})
