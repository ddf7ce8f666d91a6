"""Check a conversation that a task brings along, for an episode that goes on from its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rollouts.handlers.base import Message

MAX_MESSAGES = 2000
MAX_BYTES = 4_000_000  # of all messages as JSON
_FIELDS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("assistant", "user"),
}


class InvalidConversation(ValueError):
    """Say which message of a conversation is wrong and what it should be."""

    code: ClassVar[str] = "task.messages_invalid"


def check_conversation(value: Any) -> list[Message]:
    """Return a copy of a conversation that a policy can go on from.

    It may begin with the system; user and assistant take turns; every tool call is answered, in
    any order, before anybody else speaks; the last word is the user's or a tool's. Absent
    contents of calls become empty, absent names of results those of their calls. Raises
    `InvalidConversation`.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidConversation("messages must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise InvalidConversation(f"{len(value)} messages; at most {MAX_MESSAGES} may be given")
    messages: list[Message] = []
    unanswered: dict[str, str] = {}
    before = ""
    for place, given in enumerate(value):
        where = f"message {place}"
        message = _message(given, where)
        allowed = ("tool",) if unanswered else _FOLLOWS[before]
        if message["role"] not in allowed:
            raise InvalidConversation(
                f"{where}: the role is {message['role']}; here stands {' or '.join(allowed)}"
            )
        if message["role"] == "tool":
            _match(message, unanswered, where)
        unanswered |= _names_by_id(message.get("tool_calls", ()), where)
        before = message["role"]
        messages.append(message)
    if unanswered:
        raise InvalidConversation(f"the call {next(iter(unanswered))!r} has no result at the end")
    if before not in ("user", "tool"):
        raise InvalidConversation(f"the last message is the {before}'s; end with user or tool")
    _check_size(messages)
    return messages


def _message(given: Any, where: str) -> Message:
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(role, str) or role not in _FIELDS:
        raise InvalidConversation(f"{where} has no role of {', '.join(_FIELDS)}")
    unknown = sorted(str(name) for name in set(given) - _FIELDS[role])
    if unknown:
        raise InvalidConversation(f"{where}: a message of role {role} has no {unknown[0]!r}")
    message = dict(given)
    if role == "assistant" and message.get("tool_calls") and message.get("content") is None:
        message["content"] = ""
    for name in ("content", *(set(message) - {"role", "content", "tool_calls"})):
        _check_text(message.get(name), f"{where}: {name}")
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], where)
    return message


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise InvalidConversation(f"{where}: tool_calls must be a list with at least one call")
    return [_call(call, f"{where}, call {number}") for number, call in enumerate(given)]


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or set(given) != {"id", "type", "function"}
        or set(function) != {"name", "arguments"}
        or given["type"] != "function"
    ):
        raise InvalidConversation(
            f"{where}: it must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}}"
        )
    for name, text in (("id", given["id"]), ("name", function["name"])):
        _check_text(text, f"{where}: {name}", may_be_empty=False)
    _check_text(function["arguments"], f"{where}: arguments")
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidConversation(f"{where}: arguments must be the JSON text of an object")
    return {"id": given["id"], "type": "function", "function": dict(function)}


def _names_by_id(calls: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    names = {call["id"]: call["function"]["name"] for call in calls}
    if len(names) < len(calls):
        raise InvalidConversation(f"{where}: two of its calls have the same id")
    return names


def _match(message: Message, unanswered: dict[str, str], where: str) -> None:
    """Take a result as the answer to its call."""
    name = unanswered.pop(message.get("tool_call_id", ""), None)
    if name is None:
        raise InvalidConversation(f"{where}: tool_call_id names no call that waits for a result")
    message.setdefault("name", name)


def _check_text(value: Any, what: str, *, may_be_empty: bool = True) -> None:
    if not isinstance(value, str):
        raise InvalidConversation(f"{what} must be a text")
    if not value and not may_be_empty:
        raise InvalidConversation(f"{what} must not be empty")
    if "\0" in value:
        raise InvalidConversation(f"{what} holds a NUL character; remove it")


def _check_size(messages: Sequence[Message]) -> None:
    try:
        size = len(json.dumps(messages, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise InvalidConversation(f"messages hold half of a surrogate pair: {error}") from error
    if size > MAX_BYTES:
        raise InvalidConversation(f"messages have {size} bytes as JSON; at most {MAX_BYTES} fit")
