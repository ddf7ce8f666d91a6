"""Attempts at tool calls, and what to tell a model whose attempt cannot be run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.inference.parsed import ToolCall
from rollouts.inference.parsing.values import clean_name, read_arguments, usable_id
from rollouts.text import clean_text

Tool = Mapping[str, Any]

# Each that is not JSON costs a walk along the turn; no agent carries out so many.
MAX_ATTEMPTS = 128

CUT = "The call was cut off before its end, so it was not run. Write a shorter call, and close it."
NO_NAME = 'The call names no tool. Write the tool\'s name as a string under "name".'
BAD_JSON = "The call is not valid JSON ({error}). Write it again, with strings quoted and escaped."
UNKNOWN = "There is no tool named {name}. Your tools are: {names}."
TOO_MANY = "Only {count} calls of one turn are read. Write fewer."
MALFORMED = "The call does not have the form that your instructions show. Write it again."


@dataclass(frozen=True, slots=True)
class Attempt:
    """Hold one attempt at a call: `complaint` is empty where `arguments` could be read."""

    name: str = ""
    arguments: Any = None
    complaint: str = ""
    id: str = ""


def from_object(value: Any, argument_keys: Sequence[str] = ("arguments", "parameters")) -> Attempt:
    """Read a decoded `{"name": …, "arguments": {…}}`."""
    if not isinstance(value, Mapping):
        return Attempt(complaint=MALFORMED)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Attempt(complaint=NO_NAME)
    given: Any = next((value[key] for key in argument_keys if key in value), {})
    call_id = value.get("id")
    return Attempt(name, given, id=call_id if isinstance(call_id, str) else "")


def too_many() -> Attempt:
    """Return the attempt that stands for all that come after the last one read."""
    return Attempt(complaint=TOO_MANY.format(count=MAX_ATTEMPTS))


def bad_json(error: ValueError, name: str = "") -> Attempt:
    """Return the attempt whose JSON does not parse."""
    return Attempt(name, complaint=BAD_JSON.format(error=error))


def as_calls(
    attempts: Sequence[Attempt], ids: Sequence[int], tools: Sequence[Tool] | None
) -> tuple[ToolCall, ...]:
    """Return attempts as calls, checked against the tools where they are given.

    Made-up ids depend on the sampled ids alone, so a replayed turn gets the same; nine letters
    and digits, the one form that Mistral's templates accept.
    """
    names = None if tools is None else [_tool_name(tool) for tool in tools]
    seed = b",".join(str(number).encode() for number in ids)
    return tuple(
        _as_call(attempt, hashlib.sha256(b"%d:%b" % (place, seed)).hexdigest()[:9], names)
        for place, attempt in enumerate(attempts)
    )


def _as_call(attempt: Attempt, made_up: str, names: Sequence[str] | None) -> ToolCall:
    call_id, name = usable_id(attempt.id) or made_up, clean_name(attempt.name)
    # A wrong name comes first: without its tool's schema the arguments may be misread as well.
    named = attempt.name or not attempt.complaint
    if names is not None and named and attempt.name not in names:
        complaint = UNKNOWN.format(name=name, names=", ".join(names) or "none")
        return ToolCall(call_id, name, None, complaint)
    if attempt.complaint:
        return ToolCall(call_id, name, None, clean_text(attempt.complaint))
    return ToolCall(call_id, name, *read_arguments(attempt.arguments, name))


def _tool_name(tool: Tool) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def parameter_types(tools: Sequence[Tool] | None, name: str) -> dict[str, Any]:
    """Return the JSON schema type of each parameter of a tool, empty where it is unknown."""
    for tool in tools or ():
        function = tool.get("function")
        body = function if isinstance(function, Mapping) else tool
        if body.get("name") == name:
            properties = (body.get("parameters") or {}).get("properties") or {}
            return {
                key: schema.get("type") if isinstance(schema, Mapping) else None
                for key, schema in properties.items()
            }
    return {}
