"""The trace accepts exact extensions, forks on anything else, and never contradicts itself."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.inference.protocol import SamplingParams
from rollouts.inference.trace import Trace, TraceError


def sampled(trace: Trace, ids: list[int], version: int | None = 1) -> None:
    trace.append_sampled(
        ids, [-0.5] * len(ids), policy_version=version, finish_reason="stop", logprob_mode="raw"
    )


def test_a_conversation_of_exact_extensions_is_one_segment() -> None:
    trace = Trace()

    trace.extend([1, 2, 3])
    trace.append_sampled(
        [4, 5],
        [-0.1, -0.2],
        policy_version=7,
        finish_reason="stop",
        sampling=SamplingParams(max_tokens=8),
        logprob_mode="after_temperature",
    )
    trace.extend([1, 2, 3, 4, 5, 6, 7])
    trace.append_sampled(
        [8],
        [-0.3],
        policy_version=9,
        finish_reason="length",
        logprob_mode="after_temperature",
    )

    assert trace.as_dict() == [
        {
            "id": 0,
            "parent": None,
            "fork_reason": None,
            "sampling": SamplingParams(max_tokens=8).as_dict(),
            "logprob_mode": "after_temperature",
            "turns": [
                {"start": 0, "end": 2, "finish_reason": "stop", "reward": None},
                {"start": 4, "end": 5, "finish_reason": "length", "reward": None},
            ],
            "prompt_ids": [1, 2, 3],
            "response_ids": [4, 5, 6, 7, 8],
            "response_mask": [1, 1, 0, 0, 1],
            "response_logprobs": [-0.1, -0.2, 0.0, 0.0, -0.3],
            "policy_versions": [[7, 4], [9, 1]],
        }
    ]
    assert (trace.forks, trace.turns, trace.sampled_tokens) == (0, 2, 3)


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([1, 2, 3, 4, 9, 6], id="a sampled token changed"),
        pytest.param([1, 2, 3, 4], id="a sampled token is gone"),
        pytest.param([9, 2, 3, 4, 5, 6], id="the first prompt changed"),
    ],
)
def test_a_prompt_that_does_not_extend_starts_a_fork(prompt: list[int]) -> None:
    trace = Trace()
    trace.extend([1, 2, 3])
    sampled(trace, [4, 5])

    segment = trace.extend(prompt, fork_reason="history_rewritten")
    sampled(trace, [6])

    assert (segment.id, segment.parent, segment.fork_reason) == (1, 0, "history_rewritten")
    assert trace.forks == 1
    first, second = trace.as_dict()
    assert first["response_ids"] == [4, 5]
    assert (second["prompt_ids"], second["response_ids"]) == (prompt, [6])


def test_a_prompt_given_again_after_a_fault_changes_nothing() -> None:
    trace = Trace()
    trace.extend([1, 2])
    trace.extend([1, 2])
    sampled(trace, [3])
    trace.extend([1, 2, 3, 4])
    trace.extend([1, 2, 3, 4])
    sampled(trace, [5])

    assert trace.as_dict()[0]["response_ids"] == [3, 4, 5]
    assert trace.forks == 0


def test_an_unknown_version_is_visible() -> None:
    trace = Trace()
    trace.extend([1])
    sampled(trace, [2, 3], version=None)

    assert trace.as_dict()[0]["policy_versions"] == [[-1, 2]]


def test_sampling_without_a_prompt_is_refused() -> None:
    trace = Trace()
    with pytest.raises(TraceError, match="prompt"):
        sampled(trace, [1])
    trace.extend([1])
    sampled(trace, [2])
    with pytest.raises(TraceError, match="prompt"):
        sampled(trace, [3])
    assert trace.token_ids == [1, 2]


def test_unequal_lengths_are_refused_and_leave_nothing_behind() -> None:
    trace = Trace()
    trace.extend([1])
    with pytest.raises(TraceError, match="2 ids with 1"):
        trace.append_sampled([2, 3], [-0.1], policy_version=1, finish_reason="stop")
    with pytest.raises(TraceError, match="at least one"):
        trace.append_sampled([], [], policy_version=1, finish_reason="stop")
    assert trace.token_ids == [1]


turn = st.tuples(
    st.lists(st.integers(0, 99), min_size=1, max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(0, 99), max_size=4),
    st.booleans(),
)


@given(st.lists(turn, min_size=1, max_size=8), st.integers(0, 8))
def test_a_trace_rebuilt_in_the_middle_ends_the_same(turns: list[Any], cut: int) -> None:
    whole, resumed = Trace(), Trace()
    for place, (ids, version, added, fork) in enumerate(turns):
        if place == cut:
            resumed = Trace.from_dict(json.loads(json.dumps(resumed.as_dict())))
        for trace in (whole, resumed):
            prompt = [*trace.token_ids, *added, 7]
            trace.extend([100, *prompt] if fork else prompt)
            sampled(trace, ids, version)

    segments = whole.as_dict()
    assert resumed.as_dict() == segments
    for segment in segments:
        length = len(segment["response_ids"])
        assert len(segment["response_mask"]) == len(segment["response_logprobs"]) == length
        assert sum(run for _, run in segment["policy_versions"]) == length
    assert sum(sum(s["response_mask"]) for s in segments) == sum(len(t[0]) for t in turns)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response_mask", [1, 1, 0]),
        ("response_mask", [1, 0, 0, 1]),
        ("response_logprobs", [-0.5, -0.5, -0.1, -0.5]),
        ("response_logprobs", []),
        ("policy_versions", [[1, 3]]),
        ("policy_versions", [[1, 4], [2, 0]]),
        ("turns", [{"start": 0, "end": 9, "finish_reason": "stop", "reward": None}]),
        ("prompt_ids", []),
        ("parent", 3),
        ("id", 2),
    ],
)
def test_a_broken_segment_is_refused(key: str, value: Any) -> None:
    trace = Trace()
    trace.extend([1])
    sampled(trace, [2, 3])
    trace.extend([1, 2, 3, 4])
    sampled(trace, [5])
    body = copy.deepcopy(trace.as_dict())
    assert Trace.from_dict(body).as_dict() == body

    body[0][key] = value

    with pytest.raises(TraceError):
        Trace.from_dict(body)


def test_interleaved_conversations_do_not_fork_each_turn() -> None:
    trace = Trace()
    trace.extend([1, 2, 3])
    sampled(trace, [4])
    agent = trace.extend([1, 9], fork_reason="parallel_agent")
    sampled(trace, [5])
    main = trace.extend([1, 2, 3, 4, 6])
    again = trace.extend([1, 9, 5, 7])
    trace.append_sampled([8], [-0.5], policy_version=1, finish_reason="stop", segment_id=main.id)
    sampled(trace, [8])

    assert (agent.id, again.id, main.id) == (1, 1, 0)
    assert trace.fork_counts() == {"parallel_agent": 1}
    assert [segment.token_ids for segment in trace.segments] == [
        [1, 2, 3, 4, 6, 8],
        [1, 9, 5, 7, 8],
    ]


def test_a_fork_hangs_on_the_segment_it_shares_most_with() -> None:
    trace = Trace()
    trace.extend([1, 2, 3])
    sampled(trace, [4])
    trace.extend([1, 7, 7], fork_reason="compacted")
    sampled(trace, [5])

    third = trace.extend([1, 2, 3, 4 + 96], fork_reason="history_edited")
    named = trace.extend([1, 2, 8], fork_reason="parallel_agent", parent=1)

    assert (third.parent, trace.common_prefix(third)) == (0, 3)
    assert (named.parent, trace.common_prefix(named)) == (1, 1)
    assert trace.fork_counts() == {"compacted": 1, "history_edited": 1, "parallel_agent": 1}
    with pytest.raises(TraceError, match="no segment 9"):
        trace.extend([1], parent=9)


def test_the_longest_match_wins() -> None:
    trace = Trace()
    trace.extend([1])
    sampled(trace, [2])
    longer = trace.extend([1, 3], fork_reason="history_edited")
    sampled(trace, [4])
    shared = trace.extend([1, 2, 9])
    assert shared.id == 0
    assert trace.extend([1, 3, 4, 5]).id == longer.id


def test_each_token_carries_its_version() -> None:
    trace = Trace()
    trace.extend([1])
    trace.append_sampled(
        [2, 3, 4],
        [-0.1] * 3,
        policy_version=8,
        finish_reason="stop",
        version_runs=((7, 2), (8, 1)),
    )
    trace.extend([1, 2, 3, 4, 5])
    trace.extend([1, 2, 3, 4, 5, 6], policy_version=9)

    (segment,) = trace.as_dict()
    assert segment["policy_versions"] == [[7, 2], [8, 2], [9, 1]]
    with pytest.raises(TraceError, match="do not add up to 2"):
        trace.append_sampled(
            [2, 3],
            [-0.1] * 2,
            policy_version=8,
            finish_reason="stop",
            version_runs=((7, 3),),
        )
    assert trace.as_dict() == [segment]
