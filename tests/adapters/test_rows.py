"""Rows: what every adapter starts from."""

from typing import Any

import pytest
from prorl_client import InlineTask
from prorl_client.adapters.rows import (
    ForkedTrajectory,
    advantages_of,
    is_scored,
    neutral_reward,
    placeholder,
    rows_of,
    samples_of,
    single_row,
    status_of,
)
from prorl_client.adapters.sampling import NoTask, prompt_text, runs_of, task_of
from prorl_client.adapters.turns import turns_of

from tests.adapters.made import every_kind, trajectory

KINDS = every_kind()


def test_a_row_ends_with_its_last_sampled_token() -> None:
    [row] = rows_of(trajectory())
    assert row.prompt_ids == [1, 2, 3]
    assert row.response_ids == [11, 12, 90, 91, 13, 14, 15]
    assert row.mask == row.loss_mask == [1, 1, 0, 0, 1, 1, 1]
    assert row.logprobs == [-0.5, -0.25, 0.0, 0.0, -1.0, -0.125, -2.0]
    assert row.versions == [3, 3, 3, 3, 4, 4, 4]
    assert row.version_span == (3, 4)
    assert row.reward == 1.0
    assert row.sampled == 5


def test_every_sampled_token_of_a_fork_is_in_one_row() -> None:
    rows = rows_of(KINDS["forked"])
    assert [row.sampled for row in rows] == [5, 1]
    assert rows[1].prompt_ids == [1, 2, 11, 90]
    assert single_row(KINDS["forked"]).sampled == 5  # type: ignore[union-attr]
    assert single_row(KINDS["forked"], forks="last").sampled == 1  # type: ignore[union-attr]
    with pytest.raises(ForkedTrajectory, match="2 segments"):
        single_row(KINDS["forked"], forks="refuse")
    assert single_row(KINDS["completed"], forks="refuse") is not None


@pytest.mark.parametrize(
    ("kind", "status", "scored", "rows"),
    [
        ("completed", "completed", True, 1),
        ("zero", "completed", True, 1),
        ("negative", "completed", True, 1),
        ("truncated", "truncated", True, 1),
        ("forked", "completed", True, 2),
        ("unscored", "failed", False, 1),
        ("failed", "failed", False, 0),
        ("cancelled", "cancelled", False, 0),
        ("text only", "completed", False, 0),
        ("from Arrow", "completed", True, 1),
    ],
)
def test_each_kind_has_its_status_and_rows(kind: str, status: str, scored: bool, rows: int) -> None:
    found = rows_of(KINDS[kind])
    assert status_of(KINDS[kind]) == status
    assert is_scored(KINDS[kind]) is scored
    assert len(found) == rows
    assert all((sum(row.loss_mask) > 0) is scored for row in found)
    assert all((row.reward is None) is not scored for row in found)


def test_a_placeholder_is_never_trained_on() -> None:
    row = placeholder(KINDS["completed"], 7)
    assert (row.prompt_ids, row.response_ids, row.loss_mask) == ([7], [7], [0])
    assert (row.reward, row.version_span, row.is_scored) == (None, None, False)


def test_clipping_keeps_what_was_sampled() -> None:
    [row] = rows_of(trajectory())
    short = row.clipped(3)
    assert (short.response_ids, short.mask, short.logprobs) == (
        [11, 12, 90],
        [1, 1, 0],
        [-0.5, -0.25, 0.0],
    )
    assert row.clipped(7) is row


def test_turns_joined_are_the_row() -> None:
    [row] = rows_of(trajectory())
    turns = turns_of(row)
    assert [turn.read_ids for turn in turns] == [[1, 2, 3], [90, 91]]
    assert [turn.said_ids for turn in turns] == [[11, 12], [13, 14, 15]]
    assert [turn.prompt_ids for turn in turns] == [[1, 2, 3], [1, 2, 3, 11, 12, 90, 91]]
    assert [turn.logprobs for turn in turns] == [[-0.5, -0.25], [-1.0, -0.125, -2.0]]
    joined = [token for turn in turns for token in turn.read_ids + turn.said_ids]
    assert joined == row.token_ids


def test_a_group_is_filled_up_and_failed_samples_give_way() -> None:
    group = [
        trajectory(sample=0),
        trajectory(sample=1, outcome="timed_out", reward=None, trainable=False),
        trajectory(sample=2),
    ]
    assert [each.sample for each in samples_of(group, 2)] == [0, 2]
    filled = samples_of(group[:1], 3)
    assert [each.outcome for each in filled] == ["scored", None, None]
    assert [each.task_ref for each in filled] == ["ref"] * 3
    assert samples_of([], 1)[0].reward is None


@pytest.mark.parametrize(
    ("rewards", "scale", "advantages"),
    [
        ([1.0, 0.0], False, [0.5, -0.5]),
        ([1.0, None, 0.0], False, [0.5, None, -0.5]),
        ([1.0, 1.0], True, [0.0, 0.0]),
        ([None, None], True, [None, None]),
        ([], True, []),
    ],
)
def test_advantages_leave_out_what_has_no_reward(
    rewards: Any, scale: bool, advantages: Any
) -> None:
    assert advantages_of(rewards, scale=scale) == advantages


def test_scaled_advantages_are_in_units_of_the_spread() -> None:
    assert advantages_of([2.0, 0.0], epsilon=0.0) == [1.0, -1.0]


def test_a_neutral_reward_leaves_the_mean_as_it_is() -> None:
    group = [KINDS["completed"], KINDS["zero"], KINDS["failed"]]
    assert neutral_reward(group) == 0.5
    assert neutral_reward([KINDS["failed"]]) == 0.0


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"task_ref": "a"}, {"task_ref": "a"}),
        ({"task": "a"}, {"task_ref": "a"}),
        ({"task_id": "u"}, {"task": "u"}),
        ({"extra_info": {"task_ref": "a"}}, {"task_ref": "a"}),
        ({"metadata": {"task_id": "u"}}, {"task": "u"}),
        ({"task_ref": "", "env_extras": {"task_ref": "b"}}, {"task_ref": "b"}),
        ({"inline": {"environment": "e"}}, {"inline": {"environment": "e"}}),
        ({"verifier_metadata": None, "extra_env_info": {"task": "c"}}, {"task_ref": "c"}),
    ],
)
def test_a_row_names_its_task(row: Any, task: Any) -> None:
    assert task_of(row) == task


def test_a_row_may_carry_a_whole_task() -> None:
    inline = InlineTask(environment="e", instruction="x")
    assert task_of({"metadata": {"inline": inline}}) == {"inline": inline}


@pytest.mark.parametrize("row", [{}, {"task": 7}, {"extra_info": "x"}, {"inline": "x"}])
def test_a_row_without_a_task_says_what_to_do(row: Any) -> None:
    with pytest.raises(NoTask, match="task_ref"):
        task_of(row)


def test_prompts_text() -> None:
    assert prompt_text("plain") == "plain"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt_text(talk) == "a"
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert prompt_text([{"role": "user", "content": parts}]) == "xy"
    with pytest.raises(NoTask):
        prompt_text([{"role": "system", "content": "a"}])


def test_equal_neighbours_are_one_run() -> None:
    assert runs_of(["a", "a", "b", "a"]) == [("a", 2), ("b", 1), ("a", 1)]
    assert runs_of([]) == []
