"""Render with the hand-written renderer that the package `renderers` has for a model family."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import create_renderer
from renderers.base import ParsedToolCall, ToolCallParseStatus
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from rollouts.inference.exceptions import CannotExtend, RenderingFault
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.parsing.attempts import BAD_JSON, CUT, MALFORMED, NO_NAME, Attempt, as_calls
from rollouts.inference.tokenizer_folder import TokenizerFolder
from rollouts.text import whole_characters

Message = Mapping[str, Any]


class FamilyRenderer:
    """Render by family. Text never becomes a special token; marks such as `<think>` may."""

    def __init__(self, folder: TokenizerFolder, family: str, options: Mapping[str, Any]) -> None:
        self._folder = folder
        try:
            config = type(config_from_name(family))(**options)
            tokenizer = _FamilyTokenizer(folder)
            self._renderer = create_renderer(tokenizer, config)
        except Exception as error:  # renderers raises what it finds: ValueError, AssertionError, …
            raise RenderingFault(
                f"{folder.path} cannot be rendered as {family}: {error}"
            ) from error
        tokenizer.take_all_as_text()
        probe = [{"role": "user", "content": "a"}]
        without = self._renderer.render_ids(probe, add_generation_prompt=False)
        self._opening = self._renderer.render_ids(probe, add_generation_prompt=True)[len(without) :]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end a turn."""
        return tuple(self._renderer.get_stop_token_ids())

    @property
    def supports_tools(self) -> bool:
        """Say that every family shows tools to the model."""
        return True

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of the whole prompt, generation prompt included."""
        try:
            ids = self._renderer.render_ids(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=True,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RenderingFault(f"the messages cannot be rendered: {error}") from error
        return list(ids)

    def bridge(
        self,
        previous_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the whole next prompt: `previous_ids` untouched, then the family's own tokens.

        Raises CannotExtend where the family cannot extend a conversation.
        """
        previous = list(previous_ids)
        start = _after_last(previous, self._opening)
        try:
            rendered = self._renderer.bridge_to_next_turn(
                previous[:start],
                previous[start:],
                [dict(message) for message in new_messages],
                tools=[dict(tool) for tool in tools] if tools else None,
            )
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CannotExtend(f"this family cannot extend the conversation: {error}") from error
        ids = [] if rendered is None else list(rendered.token_ids)
        if ids[: len(previous)] != previous:
            raise CannotExtend("this family cannot extend the conversation by these messages")
        return ids

    def parse(
        self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ParsedTurn:
        """Return what a sampled turn says; a broken call carries a complaint, nothing raises."""
        sampled = list(ids)
        try:
            parsed = self._renderer.parse_response(
                sampled,
                tools=[dict(tool) for tool in tools] if tools else None,
                prompt_ids=self._opening,
            )
        except Exception:  # what a policy wrote must end no rollout, whatever the family does
            broken = as_calls([Attempt(complaint=MALFORMED)], sampled, tools)
            return ParsedTurn(self.decode(sampled), None, broken)
        attempts = [_attempt(call) for call in parsed.tool_calls]
        calls = as_calls(attempts, sampled, tools)
        return ParsedTurn(parsed.content or "", parsed.reasoning_content, calls)

    def count(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return how many tokens the rendered prompt has."""
        return len(self.render(messages, tools))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        return self._folder.decode(ids)


class _FamilyTokenizer:
    """Offer what `renderers` asks of a tokenizer, without transformers."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self.name_or_path = str(folder.path)
        self.eos_token_id = folder.eos_token_id
        self.unk_token_id: int | None = None
        self._folder = folder
        self._tokenizer = Tokenizer.from_str(folder.full.to_str())

    def take_all_as_text(self) -> None:
        """Take no text for a special token any more; DeepSeek's looks its own up by encoding."""
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str, *_arguments: Any, **_options: Any) -> list[int]:
        return list(self._tokenizer.encode(whole_characters(text), add_special_tokens=False).ids)

    def decode(self, token_ids: Any, *_arguments: Any, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._folder.decode(ids, skip_special=options.get("skip_special_tokens", False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._folder.token_id(tokens)
        return [self._folder.token_id(token) for token in tokens]


_COMPLAINTS = {
    ToolCallParseStatus.OK: "",
    ToolCallParseStatus.UNCLOSED_BLOCK: CUT,
    ToolCallParseStatus.MISSING_NAME: NO_NAME,
    ToolCallParseStatus.INVALID_JSON: BAD_JSON.format(error="it does not parse"),
    ToolCallParseStatus.UNKNOWN_TOOL: "",  # told with the names there are, by as_calls
}


def _attempt(call: ParsedToolCall) -> Attempt:
    complaint = _COMPLAINTS.get(call.status, MALFORMED)
    return Attempt(call.name or "", call.arguments, complaint, call.id or "")


def _after_last(ids: list[int], opening: list[int]) -> int:
    for start in range(len(ids) - len(opening), -1, -1):
        if ids[start : start + len(opening)] == opening:
            return start + len(opening)
    raise CannotExtend("the previous ids hold no generation prompt of this family")
