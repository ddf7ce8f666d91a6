"""Text that merely looks like a control token, hidden from templates and put back as it was."""

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.tokenizer_folder import ControlToken

Message = Mapping[str, Any]


class Hidden:
    """Hide look-alikes of control tokens behind random words, and put them back."""

    def __init__(self, control: Sequence[ControlToken]) -> None:
        self._nonce = secrets.token_hex(16)
        self._originals: list[str] = []
        self._every = _plain_pattern([token.text for token in control])
        self._special = _plain_pattern([token.text for token in control if token.special])

    def message(self, message: Message) -> dict[str, Any]:
        """Return the message with look-alikes hidden and text parts joined.

        An assistant's message may hold tokens that are not special, such as a mark of
        thinking; nobody else's may.
        """
        every = message.get("role") != "assistant"
        hidden = {
            key: value if key == "role" else self.value(value, every=every)
            for key, value in with_read_arguments(message).items()
        }
        if isinstance(hidden.get("content"), list):
            hidden["content"] = "".join(map(_part_text, hidden["content"]))
        return hidden

    def value(self, value: Any, *, every: bool) -> Any:
        """Return a JSON value with look-alikes hidden in every string."""
        if isinstance(value, str):
            return (self._every if every else self._special).sub(self._hide, value)
        if isinstance(value, Mapping):
            return {
                self.value(key, every=every): self.value(entry, every=every)
                for key, entry in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(entry, every=every) for entry in value]
        return value

    def reveal(self, text: str) -> str:
        """Put back what was hidden."""
        if self._nonce not in text:
            return text
        return re.sub(
            rf"hidden{self._nonce}n(\d+)e", lambda m: self._originals[int(m.group(1))], text
        )

    def _hide(self, match: re.Match[str]) -> str:
        self._originals.append(match.group())
        return f"hidden{self._nonce}n{len(self._originals) - 1}e"


def with_read_arguments(message: Message) -> Message:
    """Return the message with calls' arguments as objects: templates would quote a string again."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # else shown as the string it is
                function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function} if function else call)
    return {**message, "tool_calls": calls}


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    raise RenderingFault("only text parts of a message can be rendered")


def _plain_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return _any_of(map(re.escape, longest_first), {text[0] for text in longest_first})


def control_pattern(control: Sequence[ControlToken]) -> re.Pattern[str]:
    """Match a control token with the white space it swallows; its own text is the named group."""
    longest_first = sorted(control, key=lambda token: len(token.text), reverse=True)
    choices = [
        # Begins where the white space does: any later start would walk along all of it again.
        (r"(?:(?<!\s)\s+)?" if token.strips_left else "")
        + f"(?P<c{token.id}>{re.escape(token.text)})"
        + (r"\s*" if token.strips_right else "")
        for token in longest_first
    ]
    first = {token.text[0] for token in control if token.text}
    return _any_of(choices, first, or_space=any(token.strips_left for token in control))


def _any_of(
    choices: Iterable[str], first: Collection[str], *, or_space: bool = False
) -> re.Pattern[str]:
    """Match one of the choices; what they begin with goes ahead of a thousand comparisons."""
    if not first:
        return re.compile(r"(?!)")
    begin = "".join(map(re.escape, sorted(first))) + (r"\s" if or_space else "")
    return re.compile(f"(?=[{begin}])(?:{'|'.join(choices)})")
