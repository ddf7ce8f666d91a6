"""Trajectories in the Agent Trajectory Interchange Format, version 1.8.

Each sampled turn is an agent step with the token ids and log-probabilities that it was sampled
with; messages of tools become the observation of the step before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from prorl_client.exports.base import Export
from prorl_client.trajectories import Segment, Trajectory, Turn

SCHEMA_VERSION = "ATIF-v1.8"
AGENT_VERSION = "1"


class AtifExport(Export):
    """A folder with a document for each trajectory, named by its rollout."""

    needs_messages = True

    def open(self) -> None:
        """Make the folder."""
        self.partial.mkdir()

    def add(self, trajectory: Trajectory) -> None:
        """Write a document."""
        text = json.dumps(as_atif(trajectory), ensure_ascii=False, indent=1)
        (self.partial / f"{trajectory.rollout}.json").write_text(text + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Nothing is left to write."""


class AtifLinesExport(Export):
    """A file with a document a line."""

    needs_messages = True
    _file: IO[str]

    def open(self) -> None:
        """Begin to write."""
        self._file = self.partial.open("x", encoding="utf-8")

    def add(self, trajectory: Trajectory) -> None:
        """Write a line."""
        json.dump(as_atif(trajectory), self._file, separators=(",", ":"), ensure_ascii=False)
        self._file.write("\n")

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


def as_atif(trajectory: Trajectory) -> dict[str, Any]:
    """Return the document of a trajectory with its messages."""
    steps = _steps(trajectory)
    agent = {
        "name": trajectory.environment.partition("@")[0],
        "version": trajectory.environment.partition("@")[2] or AGENT_VERSION,
        "tool_definitions": [dict(each) for each in trajectory.tools or ()] or None,
    }
    prompts = sum(step.get("metrics", {}).get("prompt_tokens", 0) for step in steps)
    final = {
        "total_prompt_tokens": prompts or None,
        "total_completion_tokens": trajectory.sampled_tokens or None,
        "total_steps": len(steps),
        "extra": {"reward": trajectory.reward, "rewards": dict(trajectory.rewards)},
    }
    extra = {
        "outcome": trajectory.outcome,
        "stop_reason": trajectory.stop_reason,
        "trainable": trajectory.trainable,
        "group": trajectory.group,
        "sample": trajectory.sample,
        "task": trajectory.task,
        "task_ref": trajectory.task_ref,
        "policy_version": {"first": trajectory.first_version, "last": trajectory.last_version},
        "metadata": dict(trajectory.metadata),
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "session_id": trajectory.rollout,
        "trajectory_id": trajectory.rollout,
        "agent": _without_none(agent),
        "steps": steps,
        "final_metrics": _without_none(final),
        "extra": extra,
    }
    return document


def _steps(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages = trajectory.messages or ()
    said = sum(message.get("role") == "assistant" for message in messages)
    turns = list(_turns(trajectory))
    # Before the first sampled turn there may be turns that the task came with.
    given = said - len(turns)
    steps: list[dict[str, Any]] = []
    place = 0
    for message in messages:
        role = message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        step: dict[str, Any] = {"step_id": len(steps) + 1, **_said(message)}
        if role == "assistant":
            if 0 <= place - given < len(turns) and given >= 0:
                step["metrics"] = turns[place - given]
                step["llm_call_count"] = 1
            place += 1
        steps.append(step)
    return steps


def _turns(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each sampled turn, in the order of sampling."""
    for segment in trajectory.segments:
        for turn in segment.turns:
            yield _metrics(segment, turn)


def _metrics(segment: Segment, turn: Turn) -> dict[str, Any]:
    prompt = [*segment.prompt_ids.tolist(), *segment.response_ids[: turn.start].tolist()]
    sampled = slice(turn.start, turn.end)
    versions = segment.policy_versions[sampled].tolist()
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": prompt,
        "completion_token_ids": segment.response_ids[sampled].tolist(),
        "logprobs": segment.response_logprobs[sampled].tolist(),
        "extra": {
            "segment": segment.id,
            "finish_reason": turn.finish_reason,
            "policy_versions": sorted(set(versions)),
        },
    }


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as a step without its number."""
    role = message.get("role")
    text = _text(message.get("content"))
    if role == "assistant":
        step: dict[str, Any] = {"source": "agent", "message": text}
        calls = [_call(each, number) for number, each in enumerate(message.get("tool_calls") or ())]
        if calls:
            step["tool_calls"] = calls
        thoughts = message.get("reasoning_content") or message.get("thinking")
        if thoughts:
            step["reasoning_content"] = str(thoughts)
        return step
    if role in ("system", "user"):
        return {"source": role, "message": text}
    return {"source": "system", "message": text, "extra": {"role": role}}


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"unparsed": arguments}
    return {
        "tool_call_id": str(call.get("id") or f"call-{number}"),
        "function_name": str(function.get("name", "")),
        "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
    }


def _observe(step: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Add a tool's answer to the step that asked for it."""
    result: dict[str, Any] = {"content": _text(message.get("content"))}
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    if message.get("tool_call_id") in known:
        result["source_call_id"] = message["tool_call_id"]
    step.setdefault("observation", {"results": []})["results"].append(result)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [each.get("text", "") for each in content if isinstance(each, Mapping)]
        return "\n".join(map(str, parts))
    return "" if content is None else json.dumps(content)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
