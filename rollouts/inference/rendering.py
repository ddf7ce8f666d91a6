"""Turn messages into token ids, and extend a conversation without touching what was sampled."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.tokenizer_folder import ControlToken, TokenizerFolder

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class ConversationRenderer(Protocol):
    """Render conversations of one model. Thread-safe.

    `stop_token_ids` are the ids that end a turn: send them with every request.
    `supports_tools` says whether the template shows tools to the model.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def supports_tools(self) -> bool: ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Return the ids of the whole prompt, generation prompt included."""
        ...

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Return the whole next prompt: `previous_ids` untouched, then the template's tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        ...


class TemplateRenderer:
    """Render with a chat template, and bridge by the difference that new messages make to it.

    Text that merely looks like a control token is hidden from the template and the tokenizer
    behind a random word, and put back as plain text. What belongs to the template is encoded
    together with the text beside it, so ordinary content gives the tokenizer's own ids.
    """

    def __init__(self, folder: TokenizerFolder) -> None:
        self._folder = folder
        self._control = {token.text: token for token in folder.control}
        self._split = _control_pattern(folder.control)
        self._check_against_tokenizer()
        self._end_of_turn = self._find_end_of_turn()
        probe = [{"role": "user", "content": "a"}]
        tool = {"type": "function", "function": {"name": "probe", "parameters": {}}}
        self._supports_tools = self._apply(probe, [tool]) != self._apply(probe, None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the template's end of turn, and the end of sequence where it is another."""
        eos = self._folder.eos_token_id
        ids = {self._end_of_turn: None} if eos is None else {self._end_of_turn: None, eos: None}
        return tuple(ids)

    @property
    def supports_tools(self) -> bool:
        """Say whether the template shows tools to the model."""
        return self._supports_tools

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Return the ids of the whole prompt, generation prompt included.

        Raises RenderingFault when the template refuses, or would drop the tools silently.
        """
        if tools and not self._supports_tools:
            raise RenderingFault(
                f"the chat template of {self._folder.path} ignores tools: say in a message "
                "what the model may call"
            )
        hidden = _Hidden(self._folder.control)
        text = self._apply(
            [hidden.message(message) for message in messages],
            [hidden.value(tool, every=True) for tool in tools] if tools else None,
        )
        return self._encode(text, hidden)

    def bridge(self, previous_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Return the whole next prompt: `previous_ids` untouched, then the template's own tokens.

        `previous_ids` is the last prompt and what was sampled for it. A turn that was cut is
        closed with the template's end of turn. Raises RenderingFault when a new message is the
        assistant's (it would be tokenised anew) or there is none.
        """
        if not new_messages or any(m.get("role") == "assistant" for m in new_messages):
            raise RenderingFault("a bridge takes at least one message, none of the assistant")
        hidden = _Hidden(self._folder.control)
        added = self._after_assistant([hidden.message(m) for m in new_messages], hidden, True)
        if previous_ids and previous_ids[-1] == self._end_of_turn:
            added = added[1:]
        return [*previous_ids, *added]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        return self._folder.decode(ids)

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, prompt: bool = True
    ) -> str:
        return self._folder.apply_template(
            messages=list(messages), tools=tools, add_generation_prompt=prompt
        )

    def _after_assistant(
        self, new_messages: Sequence[Message], hidden: "_Hidden", prompt: bool
    ) -> list[int]:
        """Return the ids that follow an assistant's own words, its end of turn first."""
        words = f"words{secrets.token_hex(16)}"
        opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}]
        text = self._apply([*opening, *new_messages], None, prompt)
        _, found, after = text.rpartition(words)
        if not found:
            raise RenderingFault(f"the chat template of {self._folder.path} hides earlier turns")
        return self._encode(after, hidden)

    def _find_end_of_turn(self) -> int:
        ids = self._after_assistant([], _Hidden(()), False)
        if not ids or ids[0] not in {token.id for token in self._folder.control}:
            raise RenderingFault(
                f"the chat template of {self._folder.path} ends a turn with no control token"
            )
        return ids[0]

    def _encode(self, text: str, hidden: "_Hidden") -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._split.finditer(text):
            ids += self._folder.encode_text(hidden.reveal(text[position : match.start()]))
            ids.append(self._control[match.group(match.lastgroup or 0)].id)
            position = match.end()
        return ids + self._folder.encode_text(hidden.reveal(text[position:]))

    def _check_against_tokenizer(self) -> None:
        """Refuse a tokenizer whose text depends on what stands before a control token."""
        text = self._apply([{"role": "user", "content": "Say 12 words,  \n please.\n"}], None)
        if self._encode(text, _Hidden(())) != self._folder.encode_with_control(text):
            raise RenderingFault(f"{self._folder.path}: its text cannot be encoded in pieces")


class _Hidden:
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
            for key, value in message.items()
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


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    raise RenderingFault("only text parts of a message can be rendered")


def _plain_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _control_pattern(control: Sequence[ControlToken]) -> re.Pattern[str]:
    """Match a control token with the white space it swallows; its own text is the named group."""
    longest_first = sorted(control, key=lambda token: len(token.text), reverse=True)
    choices = [
        (r"\s*" if token.strips_left else "")
        + f"(?P<c{token.id}>{re.escape(token.text)})"
        + (r"\s*" if token.strips_right else "")
        for token in longest_first
    ]
    return re.compile("|".join(choices) or r"(?!)")


def load_renderer(path: str | Path) -> ConversationRenderer:
    """Load the renderer of a tokenizer folder, once per process; raise RenderingFault.

    The folder's chat template renders, unless a `renderer.json` in it names a family of the
    package `renderers`: `{"family": "qwen3", "options": {"enable_thinking": false}}`.
    """
    return _load(str(Path(path).resolve()))


@lru_cache(maxsize=16)
def _load(path: str) -> ConversationRenderer:
    choice = _family_choice(Path(path) / "renderer.json")
    folder = TokenizerFolder(Path(path))
    if choice is None:
        return TemplateRenderer(folder)
    # Costs a second of import that a template does not need.
    from rollouts.inference.families import FamilyRenderer

    return FamilyRenderer(folder, choice["family"], choice.get("options") or {})


def _family_choice(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        choice = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RenderingFault(f"{file} is not JSON: {error}") from error
    if not isinstance(choice, dict) or not isinstance(choice.get("family"), str):
        raise RenderingFault(f"{file} is no JSON object that names a family")
    return choice
