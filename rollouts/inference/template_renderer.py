"""Render with a chat template, and bridge by the difference that new messages make to it."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollouts.inference.exceptions import CannotExtend, RenderingFault
from rollouts.inference.look_alikes import Hidden, control_pattern, with_read_arguments
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.parsing.dialects import detect
from rollouts.inference.parsing.turns import THOUGHTS, TurnParser
from rollouts.inference.tokenizer_folder import TokenizerFolder

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class TemplateRenderer:
    """Render with a chat template, and bridge by the difference that new messages make to it.

    Text that merely looks like a control token is hidden from the template and the tokenizer
    behind a random word, and put back as plain text. What belongs to the template is encoded
    together with the text beside it, so ordinary content gives the tokenizer's own ids.
    With `keeps_thoughts` sampled thoughts stay where the template would take them out of earlier
    turns; without, such a conversation cannot be extended.
    """

    def __init__(
        self,
        folder: TokenizerFolder,
        tool_parser: str | None = None,
        *,
        keeps_thoughts: bool = True,
    ) -> None:
        self._folder = folder
        self._keeps_thoughts = keeps_thoughts
        self._control = {token.text: token for token in folder.control}
        self._split = control_pattern(folder.control)
        self._check_against_tokenizer()
        self._end_of_turn = self._find_end_of_turn()
        self._ends = {self._end_of_turn, folder.token_id("<|eom_id|>")}
        probe = [{"role": "user", "content": "a"}]
        parameters = {"type": "object", "properties": {}}
        function = {"name": "probe", "description": "Probe.", "parameters": parameters}
        tool = {"type": "function", "function": function}
        prompt = self._apply(probe, None)
        self._supports_tools = self._apply(probe, [tool]) != prompt
        self._parser = TurnParser(
            folder,
            tool_parser or detect(folder.template_source()),
            opens_thought=prompt.rstrip().endswith(("<think>", "[THINK]")),
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the template's end of turn, and other ends of the vocabulary where it has any."""
        # Llama 3 ends a message with <|eom_id|> where it waits for a tool.
        others = (self._folder.eos_token_id, self._folder.token_id("<|eom_id|>"))
        return tuple(dict.fromkeys([self._end_of_turn, *(n for n in others if n is not None)]))

    @property
    def supports_tools(self) -> bool:
        """Say whether the template shows tools to the model."""
        return self._supports_tools

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Return the ids of the whole prompt, generation prompt included.

        Raises RenderingFault when the template refuses, or would drop tools or a message silently.
        """
        if tools and not self._supports_tools:
            raise RenderingFault(
                f"the chat template of {self._folder.path} ignores tools: say in a message "
                "what the model may call"
            )
        hidden = Hidden(self._folder.control)
        text = self._apply(
            [hidden.message(message) for message in messages],
            [hidden.value(tool, every=True) for tool in tools] if tools else None,
        )
        self._check_all_shown(messages)
        return self._encode(text, hidden)

    def bridge(
        self,
        previous_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Return the whole next prompt: `previous_ids` untouched, then the template's own tokens.

        `previous_ids` is the last prompt and what was sampled for it. A turn that was cut is
        closed with the template's end of turn. Raises CannotExtend where the template refuses,
        moves one of the messages, or shows tools after the history; RenderingFault when it drops
        one, or a new message is the assistant's (it would be tokenised anew) or there is none.
        """
        if not new_messages or any(m.get("role") == "assistant" for m in new_messages):
            raise RenderingFault("a bridge takes at least one message, none of the assistant")
        if not self._keeps_thoughts and self._thinks(previous_ids):
            self._check_thoughts_stay(new_messages)
        hidden = Hidden(self._folder.control)
        added = self._continuation([hidden.message(m) for m in new_messages], hidden, tools)
        if previous_ids and previous_ids[-1] in self._ends:
            added = added[1:]
        return [*previous_ids, *added]

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> ParsedTurn:
        """Return what a sampled turn says; a broken call carries a complaint, nothing raises."""
        return self._parser.parse(ids, self.stop_token_ids, tools)

    def count(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> int:
        """Return how many tokens the rendered prompt has."""
        return len(self.render(messages, tools))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        return self._folder.decode(ids)

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, prompt: bool = True
    ) -> str:
        return self._folder.apply_template(
            messages=list(messages), tools=tools, add_generation_prompt=prompt
        )

    def _continuation(
        self, new_messages: Sequence[Message], hidden: Hidden, tools: Sequence[Tool] | None
    ) -> list[int]:
        """Return the ids that follow the assistant's turn, its end first; raise CannotExtend."""
        try:
            text = self._after_calls(new_messages) or self._after_words(new_messages, None, True)
            shown = self._after_words(new_messages, tools, True) if tools else None
        except RenderingFault as error:
            raise CannotExtend(str(error)) from error
        if shown is not None and shown != self._after_words(new_messages, None, True):
            raise CannotExtend(f"{self._folder.path}: the template shows tools after the history")
        self._check_shown(new_messages)
        ids = self._encode(text, hidden)
        if not ids or ids[0] != self._end_of_turn:
            raise CannotExtend(f"{self._folder.path}: a turn ends otherwise before these messages")
        return ids

    def _check_all_shown(self, messages: Sequence[Message]) -> None:
        """Raise RenderingFault where the template leaves a message out without a word."""
        word = f"word{secrets.token_hex(16)}n"
        named = [
            {**message, "content": f"{word}{place}e"}
            if message.get("role") != "assistant" and message.get("content")
            else {**with_read_arguments(message)}
            for place, message in enumerate(messages)
        ]
        try:
            text = self._apply(named, None)
        except RenderingFault:  # it wants something of the contents themselves, which it had
            return
        said = [message for message in named if word in str(message.get("content"))]
        self._refuse_dropped([message for message in said if message["content"] not in text])

    def _refuse_dropped(self, dropped: Sequence[Message]) -> None:
        if dropped:
            roles = ", ".join(sorted({str(message.get("role")) for message in dropped}))
            raise RenderingFault(f"the template of {self._folder.path} drops messages of: {roles}")

    def _thinks(self, ids: Sequence[int]) -> bool:
        """Say whether ids hold a thought, closed or not."""
        marks = [mark for pair in THOUGHTS for mark in pair]
        numbers = {token.id for token in self._folder.control if token.text in marks}
        if numbers:
            return not numbers.isdisjoint(ids)
        text = self._folder.decode(ids, skip_special=False)
        return any(mark in text for mark in marks)

    def _check_thoughts_stay(self, new_messages: Sequence[Message]) -> None:
        """Raise CannotExtend where the template takes thoughts out of the turns before these."""
        thought, words = (f"words{secrets.token_hex(16)}" for _ in range(2))
        marked = f"<think>\n{thought}\n</think>\n\n{words}"
        probes = _probe_calls(new_messages, words)
        calls = {"tool_calls": probes} if probes else {}
        forms = ({"reasoning_content": thought, "content": words}, {"content": marked})
        for form in forms:
            turn = {"role": "assistant", **form, **calls}
            opening: list[Message] = [{"role": "user", "content": "a"}, turn]
            with suppress(RenderingFault):
                if thought in self._apply([*opening, *new_messages], None):
                    return
        raise CannotExtend(f"{self._folder.path}: the template takes out earlier thoughts")

    def _check_shown(self, new_messages: Sequence[Message]) -> None:
        """Raise CannotExtend where the template moves a new message, RenderingFault if it drops it.

        Asked with a word for each content, since templates may trim or quote a content.
        """
        word = f"word{secrets.token_hex(16)}n"
        named = [{**m, "content": f"{word}{place}e"} for place, m in enumerate(new_messages)]
        try:
            after = self._after_calls(named) or self._after_words(named, None, True)
        except RenderingFault as error:
            raise CannotExtend(str(error)) from error
        missing = [m for m in named if m["content"] not in after]
        whole = self._apply([{"role": "user", "content": "a"}, *missing], None) if missing else ""
        if any(message["content"] not in whole for message in missing):
            self._refuse_dropped(missing)
        if missing:
            raise CannotExtend(f"{self._folder.path}: the template moves a message")

    def _after_calls(self, new_messages: Sequence[Message]) -> str | None:
        """Return what follows a turn that called tools, None where the template shows no calls.

        Some templates take a tool's result only after its call, or end such a turn differently.
        """
        words = f"words{secrets.token_hex(16)}"
        calls = _probe_calls(new_messages, words)
        if not calls:
            return None
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        opening: list[Message] = [{"role": "user", "content": "a"}, turn]
        try:
            text = self._apply([*opening, *new_messages], None)
        except RenderingFault:
            return None
        _, found, after = text.rpartition(words)
        end = next(
            (
                match.start()
                for match in self._split.finditer(after)
                if self._control[match.group(match.lastgroup or 0)].id == self._end_of_turn
            ),
            None,
        )
        return after[end:] if found and end is not None else None

    def _after_words(
        self, new_messages: Sequence[Message], tools: Sequence[Tool] | None, prompt: bool
    ) -> str:
        """Return the text that follows an assistant's own words, its end of turn first."""
        words = f"words{secrets.token_hex(16)}"
        opening = [{"role": "user", "content": "a"}, {"role": "assistant", "content": words}]
        text = self._apply([*opening, *new_messages], tools, prompt)
        _, found, after = text.rpartition(words)
        if not found:
            raise RenderingFault(f"the chat template of {self._folder.path} hides earlier turns")
        return after

    def _find_end_of_turn(self) -> int:
        ids = self._encode(self._after_words([], None, False), Hidden(()))
        if not ids or ids[0] not in {token.id for token in self._folder.control}:
            raise RenderingFault(
                f"the chat template of {self._folder.path} ends a turn with no control token"
            )
        return ids[0]

    def _encode(self, text: str, hidden: Hidden) -> list[int]:
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
        if self._encode(text, Hidden(())) != self._folder.encode_with_control(text):
            raise RenderingFault(f"{self._folder.path}: its text cannot be encoded in pieces")


def _probe_calls(new_messages: Sequence[Message], words: str) -> list[dict[str, Any]]:
    """Return the calls that the tools' results among the messages would answer."""
    return [
        {
            "id": message.get("tool_call_id") or "a" * 9,
            "type": "function",
            "function": {"name": message.get("name") or "f", "arguments": {"a": words}},
        }
        for message in new_messages
        if message.get("role") == "tool"
    ]
