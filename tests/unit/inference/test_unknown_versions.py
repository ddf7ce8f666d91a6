"""A token's version is what is certain: of what servers tell in numbers, spans and events."""

from typing import Any

import pytest

from rollouts.inference.answers import as_count, as_version
from rollouts.inference.exceptions import MalformedAnswer
from rollouts.inference.llama_cpp import LlamaCppAnswer
from rollouts.inference.protocol import Generation, SamplingParams, Server
from rollouts.inference.sglang import SglangAnswer
from rollouts.inference.trace import Trace
from rollouts.inference.vllm import VllmAnswer

SAMPLING = SamplingParams(max_tokens=100)
SERVER = Server("i", "http://x", "sglang", "m", logprob_mode="raw_logprobs")


@pytest.mark.parametrize(
    ("value", "version"),
    [
        *((0, 0), ("7", 7), (2**63 - 1, 2**63 - 1), (str(2**63 - 1), 2**63 - 1)),
        *((2**63, None), (str(2**63), None), (10**30, None), (-1, None), ("-1", None)),
        *((True, None), (1.0, None), (float("inf"), None), (float("nan"), None)),
        *(
            ("9" * 5000, None),
            ("", None),
            ("default", None),
            ("²", None),
            (None, None),
            ([1], None),
        ),
    ],
)
def test_a_version_is_a_number_that_can_be_written(value: Any, version: int | None) -> None:
    assert as_version(value) == version


def test_a_count_is_bounded() -> None:
    assert [as_count(n) for n in (0, 2**31 - 1, 2**31, -1, True, 1.0)] == [
        *(0, 2**31 - 1),
        *(None, None, None, None),
    ]


def event(ids: list[int], total: int, version: Any, end: str | None = None) -> dict[str, Any]:
    meta = {
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "completion_tokens": total,
        "weight_version": version,
        "finish_reason": None if end is None else {"type": end},
    }
    return {"output_ids": ids, "meta_info": meta}


def read(*events: dict[str, Any]) -> Generation:
    answer = SglangAnswer(SERVER, [1], SAMPLING)
    for body in events:
        answer.read_safely(body)
    return answer.generation(seconds=1.0, interrupted=False)


@pytest.mark.parametrize("incremental", [True, False], ids=["new", "all"])
def test_tokens_of_events_are_of_the_versions_that_events_tell(incremental: bool) -> None:
    def so_far(new: list[int], every: list[int], version: Any, end: str | None = None) -> Any:
        return event(new if incremental else every, len(every), version, end)

    changed = read(
        so_far([5, 6], [5, 6], "7"),
        so_far([7], [5, 6, 7], "7"),
        so_far([8], [5, 6, 7, 8], "8"),
        so_far([9], [5, 6, 7, 8, 9], "8", "stop"),
    )
    untold = read(so_far([5], [5], "default"), so_far([6], [5, 6], "8", "stop"))

    assert (changed.policy_version, changed.version_runs) == (8, ((7, 3), (-1, 1), (8, 1)))
    assert (untold.policy_version, untold.version_runs) == (None, ())


def test_one_version_throughout_is_told_as_one() -> None:
    same = read(event([5], 1, "7"), event([6], 2, "7", "stop"))
    whole = read(event([5, 6], 2, "7", "stop"))
    none = read(event([5, 6], 2, None, "stop"))

    assert [(g.policy_version, g.version_runs) for g in (same, whole, none)] == [
        *((7, ()), (7, ())),
        (None, ()),
    ]


def test_spans_of_a_cut_answer_say_nothing_of_what_came_after_them() -> None:
    answer = VllmAnswer(SERVER, [1], SAMPLING)
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}
    span = {"start": 0, "end": 1, "version": "7"}
    answer.read_safely({"model": "m", "choices": [{**choice, "weight_versions": [span]}]})
    answer.read_safely({"model": "m", "choices": [choice]})

    cut = answer.generation(seconds=1.0, interrupted=True)

    assert (cut.token_ids, cut.policy_version, cut.version_runs) == ((5, 5), None, ())


@pytest.mark.parametrize("end", [True, 1.0, float("inf"), 0, 2])
def test_a_span_that_is_no_span_is_malformed(end: Any) -> None:
    answer = VllmAnswer(SERVER, [1], SAMPLING)
    span = {"start": 0, "end": end, "version": "7"}
    logprobs = {"token_logprobs": [-0.5]}
    choice = {"token_ids": [5], "logprobs": logprobs, "weight_versions": [span]}
    answer.read_safely({"model": "m", "choices": [{**choice, "finish_reason": "stop"}]})

    with pytest.raises(MalformedAnswer, match="do not cover"):
        answer.generation(seconds=1.0, interrupted=False)


def test_numbers_that_are_not_finite_are_malformed() -> None:
    error = event([5], 1, None, "abort")
    error["meta_info"]["finish_reason"]["status_code"] = float("inf")
    body = {"tokens": [5], "completion_probabilities": [{"id": 5, "prob": float("inf")}]}

    with pytest.raises(MalformedAnswer, match="left out or misshaped"):
        SglangAnswer(SERVER, [1], SAMPLING).read_safely(error)
    with pytest.raises(MalformedAnswer, match="as a log-probability"):
        LlamaCppAnswer(SERVER, [1], SAMPLING).read_safely({**body, "stop": False})


def test_what_was_found_of_a_server_is_said_where_its_answer_does_not_tell() -> None:
    assert read(event([5], 1, "7", "stop")).logprob_mode == "raw_logprobs"
    answer = LlamaCppAnswer(SERVER, [1], SAMPLING)
    body = {"tokens": [5], "completion_probabilities": [{"id": 5, "prob": 0.5}]}
    answer.read_safely({**body, "stop": True, "stop_type": "limit"})
    told = answer.generation(seconds=1.0, interrupted=False)
    assert told.logprob_mode == "processed_logprobs"


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        *((("raw", "raw"), "raw"), (("raw", "processed"), "mixed"), ((None, None), "unknown")),
        *(((None, "raw"), "mixed"), (("raw", None), "mixed")),
        (("raw", "processed", "processed"), "mixed"),
    ],
)
def test_a_segment_says_what_all_of_its_turns_are_of(
    modes: tuple[str | None, ...], said: str
) -> None:
    trace, prompt = Trace(), [1]
    for mode in modes:
        trace.extend(prompt)
        trace.append_sampled([2], [-0.5], policy_version=1, finish_reason="stop", logprob_mode=mode)
        prompt += [2, 3]

    (segment,) = Trace.from_dict(trace.as_dict()).as_dict()
    assert segment["logprob_mode"] == said
