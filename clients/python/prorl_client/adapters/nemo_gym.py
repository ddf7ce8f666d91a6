"""NeMo Gym: a rollout as a Responses object with token ids; the agent server is `nemo_gym_agent`.

Shapes: nemo-gym 0.7.0, openai_utils.py and base_resources_server.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prorl_client import InlineTask, Trajectory
from prorl_client.adapters.rows import single_row, status_of
from prorl_client.adapters.sampling import NoTask, prompt_text, task_of
from prorl_client.adapters.turns import TurnIds, turns_of
from prorl_client.submissions import Task

JSON = dict[str, Any]


def response_of(trajectory: Trajectory, *, model: str) -> JSON:
    """Return a rollout as a Responses object: its conversation, ids on each turn's last item.

    Only what was sampled in the segment with the most sampled tokens has ids. A rollout that may
    not be trained on has none.
    """
    row = single_row(trajectory)
    turns = turns_of(row) if row is not None and row.is_scored else []
    truncated = status_of(trajectory) == "truncated"
    return {
        "id": f"resp_{trajectory.rollout or 'none'}",
        "object": "response",
        "created_at": 0.0,
        "model": model,
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _items(trajectory, turns),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [_tool(each) for each in trajectory.tools or ()],
        "metadata": {"rollout": trajectory.rollout},
    }


def verify_fields(trajectory: Trajectory) -> JSON:
    """Return the score's fields of a verify response.

    What has no reward of its own is masked out of every average and of training.
    """
    status = status_of(trajectory)
    scored = trajectory.reward is not None
    return {
        "reward": trajectory.reward if trajectory.reward is not None else 0.0,
        "mask_sample": not scored,
        "failure_reason": None if scored else f"{status}: {trajectory.failure_code or 'no reward'}",
        "rollout": trajectory.rollout,
        "rewards": dict(trajectory.rewards),
        "stop_reason": trajectory.stop_reason,
    }


def task_of_run(row: Mapping[str, Any], environment: str | None) -> Task:
    """Return the task of a `/run` row; see `task_of`.

    A row that names none is one of the given environment, with its input as the text. Raises
    NoTask.
    """
    try:
        return task_of(row)
    except NoTask:
        if environment is None:
            raise
    asked = row["responses_create_params"]
    hidden = row.get("verifier_metadata")
    return InlineTask(
        environment=environment,
        instruction=prompt_text(asked["input"]),
        hidden={"evaluator_payload": dict(hidden)} if isinstance(hidden, Mapping) else {},
    )


def _items(trajectory: Trajectory, turns: list[TurnIds]) -> list[JSON]:
    messages = list(trajectory.messages or ())
    spoken = [place for place, each in enumerate(messages) if each.get("role") == "assistant"]
    first = spoken[0] if spoken else 0
    with_ids = dict(zip(spoken[-len(turns) :] if turns else [], turns, strict=False))
    items: list[JSON] = []
    for place, message in enumerate(messages[first:], start=first):
        if message.get("role") == "assistant":
            said = _said(trajectory, place, message)
            if place in with_ids:
                said[-1].update(_ids(with_ids[place]))
            items += said
        elif message.get("role") == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": str(message.get("tool_call_id", "")),
                    "output": _text(message.get("content")),
                }
            )
        else:
            items.append(
                {"type": "message", "role": "user", "content": _text(message.get("content"))}
            )
    # Fewer messages than turns, or none at all, as in an Arrow batch: the ids still go along.
    for number, turn in enumerate(turns[: len(turns) - len(with_ids)]):
        items.insert(number, {**_message(trajectory, f"turn_{number}", ""), **_ids(turn)})
    return items


def _said(trajectory: Trajectory, place: int, message: Mapping[str, Any]) -> list[JSON]:
    text = _text(message.get("content"))
    calls = message.get("tool_calls") or ()
    items = [_message(trajectory, str(place), text)] if text or not calls else []
    for number, call in enumerate(calls):
        function = call.get("function", call)
        arguments = function.get("arguments", "{}")
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{trajectory.rollout}_{place}_{number}",
                "call_id": str(call.get("id") or f"call_{place}_{number}"),
                "name": str(function.get("name", "")),
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                "status": "completed",
            }
        )
    return items


def _message(trajectory: Trajectory, name: str, text: str) -> JSON:
    return {
        "type": "message",
        "id": f"msg_{trajectory.rollout}_{name}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _ids(turn: TurnIds) -> JSON:
    return {
        "prompt_token_ids": turn.prompt_ids,
        "generation_token_ids": turn.said_ids,
        "generation_log_probs": turn.logprobs,
    }


def _tool(schema: Mapping[str, Any]) -> JSON:
    function = schema.get("function", schema)
    return {
        "type": "function",
        "name": function.get("name", ""),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": False,
    }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
