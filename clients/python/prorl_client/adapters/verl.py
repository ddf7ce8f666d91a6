"""verl: the fields of an AgentLoopOutput; the loop itself is in `verl_loop`.

Shapes: verl 0.9.1, experimental/agent_loop/agent_loop.py and trainer/ppo/v1/agent_loop_tq.py.
"""

from __future__ import annotations

from typing import Any

from prorl_client import Trajectory
from prorl_client.adapters.rows import Row, placeholder, rows_of, single_row, status_of


def output_list(
    trajectory: Trajectory, *, prompt_tokens: int | None = None, response_tokens: int | None = None
) -> list[dict[str, Any]]:
    """Return the outputs of the V1 trainer's list form: one for each segment, none when unscored.

    An empty list leaves the session out of its group. The reward is on the last output, from which
    the trainer takes it for all; a segment whose prompt is longer than `prompt_tokens` is left out.
    """
    rows = [row for row in rows_of(trajectory) if row.is_scored]
    kept = [row for row in rows if prompt_tokens is None or len(row.prompt_ids) <= prompt_tokens]
    return [_output(_fitted(row, response_tokens)) for row in kept]


def single_output(
    trajectory: Trajectory,
    *,
    stand_in: int,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the one output that the older trainer takes for a sample.

    What has no reward, no tokens or too long a prompt comes with reward 0 and a mask of zeros.
    """
    row = single_row(trajectory)
    if row is None or (prompt_tokens is not None and len(row.prompt_ids) > prompt_tokens):
        row = placeholder(trajectory, stand_in)
    return _output(_fitted(row, response_tokens))


def _fitted(row: Row, response_tokens: int | None) -> Row:
    return row if response_tokens is None else row.clipped(response_tokens)


def _output(row: Row) -> dict[str, Any]:
    trajectory, span = row.trajectory, row.version_span
    timings = trajectory.timings
    turns = row.segment.turns if row.segment is not None else ()
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.loss_mask,
        "response_logprobs": row.logprobs,
        "reward_score": row.reward if row.reward is not None else 0.0,
        "num_turns": len(trajectory.messages or ()) or trajectory.turns,
        "metrics": {
            "generate_sequences": float(timings.get("inference", 0.0)),
            "tool_calls": float(timings.get("tools", 0.0)),
            "compute_score": float(timings.get("eval", 0.0)),
        },
        "extra_fields": {
            "reward_extra_info": {},
            "turn_scores": [turn.reward for turn in turns if turn.reward is not None],
            "tool_rewards": [],
            "min_global_steps": None if span is None else span[0],
            "max_global_steps": None if span is None else span[1],
            "rollout": trajectory.rollout,
            "stop_reason": trajectory.stop_reason,
            "status": status_of(trajectory),
        },
    }
