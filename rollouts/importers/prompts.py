"""Turn the prompts that data sets hold into an instruction and a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.handlers.base import Message
from rollouts.handlers.conversation import InvalidConversation, check_conversation
from rollouts.importers.base import TaskRejected

_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = {"developer": "system"}


def read_prompt(prompt: Any, where: str) -> tuple[str, tuple[Message, ...]]:
    """Return a prompt's instruction, and its whole conversation unless that is all there is.

    `prompt` is a text, or messages in the form of OpenAI's chat or Responses API. The instruction
    is the user's last word. Raises `TaskRejected` for what cannot be shown to a policy as it is.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskRejected(f"{where} is empty; a task needs an instruction")
        return prompt, ()
    if not isinstance(prompt, Sequence) or not prompt:
        raise TaskRejected(f"{where} is empty; a task needs an instruction")
    messages = _chat(prompt, where)
    try:
        checked = check_conversation(messages)
    except InvalidConversation as fault:
        raise TaskRejected(f"{where}: {fault}") from fault
    users = [message["content"] for message in checked if message["role"] == "user"]
    if not users or not users[-1].strip():
        raise TaskRejected(f"{where} has no words of the user")
    return users[-1], () if len(checked) == 1 else tuple(checked)


def _chat(items: Sequence[Any], where: str) -> list[Message]:
    """Return messages of the chat form; items of the Responses form become turns."""
    messages: list[Message] = []
    thought = ""
    for place, item in enumerate(items):
        here = f"{where}, item {place}"
        if not isinstance(item, Mapping):
            raise TaskRejected(f"{here} is no message")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought += _thought(item)
            continue
        if kind == "message":
            message = _message(item, here)
            if message["role"] == "system" and not message["content"]:
                continue  # an empty system message says nothing
        elif kind == "function_call":
            message = _call(item)
        elif kind == "function_call_output":
            output = _text(item.get("output"), here)
            call = str(item.get("call_id"))
            message = {"role": "tool", "tool_call_id": call, "content": output}
        else:
            raise TaskRejected(f"{here} is a {kind}, which no agent here can be shown")
        if message["role"] == "assistant":
            if thought:
                message, thought = {**message, "reasoning_content": thought}, ""
            if _belongs(messages, message):
                _join(messages[-1], message)
                continue
        messages.append(message)
    return messages


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = str(item.get("role", ""))
    kept = {name: item[name] for name in ("tool_calls", "reasoning_content") if item.get(name)}
    for name in ("tool_call_id", "name"):
        if role == "tool" and item.get(name):
            kept[name] = item[name]
    content = item.get("content")
    text = "" if content is None and kept.get("tool_calls") else _text(content, where)
    return {"role": _ROLES.get(role, role), "content": text, **kept}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TaskRejected(f"{where} has no text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "part without a type"
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise TaskRejected(f"{where} holds {kind}; agents here are shown text only")
        texts.append(part["text"])
    return "".join(texts)


def _thought(item: Mapping[str, Any]) -> str:
    parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _call(item: Mapping[str, Any]) -> Message:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _belongs(messages: Sequence[Message], message: Message) -> bool:
    """Tell whether a call belongs to the assistant's turn before it."""
    return bool(messages and messages[-1]["role"] == "assistant" and message.get("tool_calls"))


def _join(turn: Message, call: Message) -> None:
    turn["tool_calls"] = [*turn.get("tool_calls", ()), *call["tool_calls"]]
    if call.get("reasoning_content"):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + call["reasoning_content"]
