"""Results, messages, tasks and settings of the surface, without a request."""

import copy
from pathlib import Path
from typing import Any

import pytest

from rollouts.api.reference.jobs import inline_task, instance_id_of
from rollouts.api.reference.messages import token_messages
from rollouts.api.reference.results import Finished, result
from rollouts.api.reference.surface import (
    DataSource,
    InvalidSurface,
    parse_surface,
    read_surface,
)
from rollouts.exceptions import InvalidValue
from rollouts.states import StopReason

SEGMENT: dict[str, Any] = {
    "turns": [{"start": 0, "end": 2}, {"start": 3, "end": 4}],
    "prompt_ids": [1, 2],
    "response_ids": [11, 12, 90, 13, 91],
    "response_mask": [1, 1, 0, 1, 0],
    "response_logprobs": [-0.5, -0.25, 0.0, -1.0, 0.0],
}
TALK = [
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "seen"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "never seen"},
]
VALID: dict[str, Any] = {"policy": "p", "data_sources": {"*": {"environment": "e"}}}


def made(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "outcome": "scored",
        "stop_reason": "finished",
        "reward": 1.0,
        "rewards": {},
        "answer": None,
        "failure_code": "",
        "failure_detail": "",
        "failed_stage": None,
        "timings": {},
        "trajectory": {"segments": [SEGMENT], "messages": TALK},
        "details": {},
    }
    return result(
        Finished(**{**values, **changes}),
        instance={},
        resolved_above=0.5,
        patch=False,
        with_tokens=True,
        input_ids=True,
    )


def ids(messages: list[dict[str, Any]]) -> list[int]:
    return [token for each in messages for token in each["token_ids"]]


def test_what_follows_the_last_turn_is_left_out() -> None:
    found = token_messages(TALK, SEGMENT, input_ids=True)
    assert [each["role"] for each in found] == ["user", "assistant", "user", "assistant"]
    assert ids(found) == [1, 2, 11, 12, 90, 13]
    assert found[3]["input_ids"] == [1, 2, 11, 12, 90]
    assert found[3]["logprobs"] == [-1.0]


def test_of_a_fork_the_last_segment_is_told_and_earlier_turns_are_prompt() -> None:
    last = {
        **SEGMENT,
        "prompt_ids": [1, 2, 11, 90],
        "response_ids": [13],
        "response_logprobs": [-1.0],
        "turns": [{"start": 0, "end": 1}],
    }
    answer = made(trajectory={"segments": [SEGMENT, last], "messages": TALK})
    assert [each["role"] for each in answer["messages"]] == ["user", "user", "assistant"]
    assert ids(answer["messages"]) == [1, 2, 11, 90, 13]
    assert [each["content"] for each in answer["messages"]] == ["Go.", "seen", "b"]
    assert answer["segments"] == 2


def test_turns_without_a_message_between_keep_the_ids_between() -> None:
    talk = [TALK[0], TALK[1], TALK[3]]
    found = token_messages(talk, SEGMENT, input_ids=False)
    assert [each["role"] for each in found] == ["user", "assistant", "user", "assistant"]
    assert ids(found) == [1, 2, 11, 12, 90, 13]
    assert all(each["input_ids"] is None for each in found)


def test_fewer_messages_than_turns_still_give_every_id() -> None:
    found = token_messages(TALK[:2], SEGMENT, input_ids=True)
    assert ids(found) == [1, 2, 11, 12, 90, 13]
    assert [each["role"] for each in found] == ["user", "assistant", "user", "assistant"]


def test_a_segment_without_turns_has_no_messages() -> None:
    assert token_messages(TALK, {**SEGMENT, "turns": []}, input_ids=True) == []


@pytest.mark.parametrize(
    ("stop_reason", "critical", "filtered", "end_properly"),
    [
        ("finished", None, False, True),
        ("max_turns", None, True, True),
        ("max_tokens", None, True, True),
        ("context_full", None, True, True),
        ("agent_timeout", "timeout", True, True),
        ("malformed_action", None, False, False),
        ("repetition", None, True, True),
        ("policy_lag", None, True, True),
        ("sandbox_limit", None, True, True),
    ],
)
def test_every_reason_to_stop_has_a_word(
    stop_reason: str, critical: str | None, filtered: bool, end_properly: bool
) -> None:
    answer = made(stop_reason=stop_reason)
    assert answer["success"] is (stop_reason == "finished")
    assert (answer["error"] is None) is answer["success"]
    assert answer["critical_error"] == critical
    assert answer["filter"] is filtered
    assert answer["end_properly"] is end_properly
    assert answer["finish"] is (stop_reason == "finished")


def test_the_reasons_above_are_all() -> None:
    assert len(StopReason) == 9


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("init", "Error in init: x.y: broke"),
        ("run", "Error in run agent: x.y: broke"),
        ("eval", "Error in eval: x.y: broke"),
    ],
)
def test_a_fault_of_the_service_names_its_stage(stage: str, error: str) -> None:
    answer = made(
        outcome="infra_failed",
        stop_reason=None,
        reward=None,
        failed_stage=stage,
        failure_code="x.y",
        failure_detail="broke",
    )
    assert (answer["error"], answer["critical_error"]) == (error, stage)
    assert (answer["filter"], answer["traceback"], answer["resolved"]) == (True, "broke", False)


def test_a_lost_trajectory_is_critical_and_filtered() -> None:
    answer = made(trajectory={}, lost="its file is missing")
    assert answer["critical_error"] == "final_result"
    assert (answer["filter"], answer["messages"]) == (True, [])


@pytest.mark.parametrize(
    ("reward", "resolved"), [(0.5, False), (0.51, True), (None, False), (-1.0, False)]
)
def test_resolved_is_a_reward_above_the_bound(reward: float | None, resolved: bool) -> None:
    assert made(reward=reward)["resolved"] is resolved


@pytest.mark.parametrize(
    ("instance", "name"),
    [
        ({"instance_id": 7}, "7"),
        ({"data_source": "m", "extra_info": {"split": "train", "index": 3}}, "m_unknown_train_3"),
        ({"extra_info": "odd"}, "unknown_unknown_unknown_unknown"),
    ],
)
def test_an_instance_without_id_gets_the_references(instance: Any, name: str) -> None:
    assert instance_id_of(instance) == name


def test_paths_reach_into_lists_and_texts_of_json() -> None:
    source = DataSource(
        environment="e",
        instruction="$.prompt[1].content",
        payload={"plain": "$x", "deep": ["$.a.b"]},
    )
    task = inline_task({"prompt": '[0, {"content": "text"}]', "a": '{"b": [1]}'}, source)
    assert task.instruction == "text"
    assert task.payload == {"plain": "$x", "deep": [[1]]}


@pytest.mark.parametrize(
    "instance",
    [
        {"a": "not json"},
        {"a": []},
        {"a": {"b": 1}},
        {},
        {"a": {"b": ""}},
    ],
)
def test_an_instruction_that_is_no_text_is_refused(instance: Any) -> None:
    with pytest.raises(InvalidValue):
        inline_task(instance, DataSource(environment="e", instruction="$.a.b"))


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": ""},
        {"policy": 1},
        {"data_sources": {}},
        {"data_sources": {"*": {}}},
        {"data_sources": {"*": {"environment": "e", "task_set": "t"}}},
        {"data_sources": {"*": {"task_set": "t", "instruction": "$.x"}}},
        {"data_sources": {"*": {"environment": "e", "payload": []}}},
        {"data_sources": {"*": {"environment": "e", "patch": 1}}},
        {"data_sources": {"*": {"environment": "e", "resolved_above": "high"}}},
        {"data_sources": {"*": {"environment": "e", "odd": 1}}},
        {"data_sources": []},
        {"networks": ["127.0.0.0/8"]},
        {"account": "a", "networks": "127.0.0.0/8"},
        {"account": "a", "networks": ["nowhere"]},
        {"account": 1},
        {"timeout_seconds": 0},
        {"timeout_seconds": True},
        {"max_in_flight": 1.5},
        {"models": {"m": ""}},
        {"input_ids": "no"},
        {"odd": 1},
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSurface, match=r" .*\.$|networks: "):
        parse_surface({**copy.deepcopy(VALID), **changes})


def test_a_file_may_be_toml(tmp_path: Path) -> None:
    path = tmp_path / "surface.toml"
    path.write_text('policy = "p"\naccount = "a"\n[data_sources."*"]\nenvironment = "e@2"\n')
    surface = read_surface(path)
    assert surface.source("anything") == DataSource(environment="e@2")
    assert surface.trusts("127.0.0.1")
    assert surface.trusts("::1")
    assert not surface.trusts("10.0.0.1")
    assert not surface.trusts("")


@pytest.mark.parametrize(
    ("names", "policy"),
    [
        (("hosted_vllm/Qwen/Qwen3-4B", ""), "four"),
        (("Qwen3-4B", ""), "p"),
        (("other", "Qwen/Qwen3-4B"), "four"),
        (("", ""), "p"),
    ],
)
def test_a_policy_is_found_by_model_then_by_tokenizer(names: Any, policy: str) -> None:
    surface = parse_surface({**VALID, "models": {"Qwen/Qwen3-4B": "four"}})
    assert surface.policy_for(*names) == policy
    assert surface.policies() == ["p", "four"]
