"""Messages with the ids that each of them adds: joined, they are the sequence that was sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

JSON = dict[str, Any]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Return messages as the reference words them, up to the last assistant's."""
    last = max((i for i, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    return [_worded(each) for each in messages[: last + 1]]


def token_messages(
    messages: Sequence[Mapping[str, Any]], segment: Mapping[str, Any], *, input_ids: bool
) -> list[JSON]:
    """Return messages with ids: `token_ids` of all of them, joined, are the segment's.

    What stands before the first sampled turn holds the prompt; an assistant's message holds its
    turn with the log-probabilities, and in `input_ids` all that came before; the environment's
    tokens between turns are on the first message between. What follows the last turn is left
    out, as in the reference.
    """
    turns = segment["turns"]
    spoken = [i for i, each in enumerate(messages) if each["role"] == "assistant"][-len(turns) :]
    if not turns:
        return []
    head = messages[: spoken[0]] if len(spoken) == len(turns) else messages[:1]
    prompt, response = segment["prompt_ids"], segment["response_ids"]
    found = _heads(head, prompt)
    for place, turn in enumerate(turns):
        between = _between(messages, spoken, place) if place else []
        start = turns[place - 1]["end"] if place else 0
        gap = response[start : turn["start"]]
        if place:
            found += _observed(between, gap)
        elif gap:
            found[-1]["token_ids"] = [*found[-1]["token_ids"], *gap]
        said = messages[spoken[place]] if len(spoken) == len(turns) else _SILENT
        found.append(
            {
                **_worded(said),
                "token_ids": response[turn["start"] : turn["end"]],
                "input_ids": [*prompt, *response[: turn["start"]]] if input_ids else None,
                "logprobs": segment["response_logprobs"][turn["start"] : turn["end"]],
            }
        )
    return found


_SILENT: Mapping[str, Any] = {"role": "assistant", "content": ""}


def _heads(messages: Sequence[Mapping[str, Any]], prompt: Sequence[int]) -> list[JSON]:
    """Return what the policy saw first, the prompt's ids on the last of it.

    Earlier assistants' turns are left out: trainers would take their ids for sampled ones.
    """
    seen = [each for each in messages if each["role"] not in ("assistant", "tool")]
    seen = seen or [{"role": "user", "content": ""}]
    found = [_without_ids(each) for each in seen]
    found[-1]["token_ids"] = list(prompt)
    return found


def _between(
    messages: Sequence[Mapping[str, Any]], spoken: Sequence[int], place: int
) -> Sequence[Mapping[str, Any]]:
    return messages[spoken[place - 1] + 1 : spoken[place]] if place < len(spoken) else []


def _observed(messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> list[JSON]:
    if not messages and not ids:
        return []
    found = [_without_ids(each) for each in messages or [{"role": "user", "content": ""}]]
    found[0]["token_ids"] = list(ids)
    return found


def _without_ids(message: Mapping[str, Any]) -> JSON:
    return {**_worded(message), "token_ids": [], "input_ids": None, "logprobs": None}


def _worded(message: Mapping[str, Any]) -> JSON:
    """Return role, content as text, and tool calls as the functions alone."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [each.get("text", "") for each in content if isinstance(each, Mapping)]
        content = "".join(texts)
    worded: JSON = {"role": message["role"], "content": content or ""}
    calls = message.get("tool_calls")
    if calls:
        worded["tool_calls"] = [_function(call) for call in calls]
    return worded


def _function(call: Mapping[str, Any]) -> JSON:
    function = call.get("function", call)
    arguments = function.get("arguments", "{}")
    return {
        "name": function.get("name", ""),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }
