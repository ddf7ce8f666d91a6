"""Read a Hugging Face tokenizer folder with `tokenizers` and Jinja alone.

The package transformers would do the same in 130 MB more and a second more of import.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollouts.inference.exceptions import RenderingFault
from rollouts.text import whole_characters


@dataclass(frozen=True, slots=True)
class ControlToken:
    """Hold one added token; the strip flags say which white space it swallows."""

    id: int
    text: str
    special: bool
    strips_left: bool
    strips_right: bool


class TokenizerFolder:
    """Encode, decode and apply the chat template of one folder. Thread-safe.

    `encode_text` never yields a control token, whatever the text says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.full = Tokenizer.from_str((path / "tokenizer.json").read_text(encoding="utf-8"))
            config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
            self._plain = _without_added_tokens(self.full)
        except Exception as error:  # tokenizers raises bare Exception
            raise RenderingFault(f"{path} is no tokenizer folder: {error}") from error
        self.config: dict[str, Any] = config
        self.control = tuple(
            ControlToken(number, token.content, token.special, token.lstrip, token.rstrip)
            for number, token in sorted(self.full.get_added_tokens_decoder().items())
        )
        forged = [token.text for token in self.control if self._forges(token)]
        if forged:
            raise RenderingFault(f"{path}: plain text gives the control tokens {forged[:3]}")
        self.named_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config.get(name))) is not None
        }
        self._template: Template | None = None

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the end of a sequence, where the folder names one."""
        return self.token_id(self.named_tokens.get("eos_token", ""))

    def token_id(self, text: str) -> int | None:
        """Return the id of one token by its text."""
        found: int | None = self.full.token_to_id(text)
        return found

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of text in which nothing is a control token."""
        return list(self._plain.encode(whole_characters(text), add_special_tokens=False).ids)

    def encode_with_control(self, text: str) -> list[int]:
        """Return the ids of text as the tokenizer itself sees it, control tokens included."""
        return list(self.full.encode(whole_characters(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""
        return str(self.full.decode(list(ids), skip_special_tokens=skip_special))

    def apply_template(self, **context: Any) -> str:
        """Return what the chat template makes of `context`; raise RenderingFault when it refuses.

        The sandbox keeps a template from reaching Python; it stays trusted as to its time.
        """
        try:
            template = self._template = self._template or self._compile(self.template_source())
            try:
                return template.render(**self.named_tokens, **context)
            except TypeError:  # DeepSeek V3's joins arguments to text: it wants them written
                written = [_with_written_arguments(message) for message in context["messages"]]
                return template.render(**self.named_tokens, **{**context, "messages": written})
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise RenderingFault(f"the chat template of {self.path} refused: {error}") from error

    def template_source(self) -> str:
        """Return the text of the chat template; raise RenderingFault where there is none."""
        file = self.path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else None
        source = source or self.config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise RenderingFault(f"{self.path} has no chat template")
        return source

    def _forges(self, token: ControlToken) -> bool:
        """Say whether a special token comes out of its text though it is not taken for one."""
        return token.special and self.encode_text(token.text) == [token.id]

    def _compile(self, source: str) -> Template:
        # The same environment as transformers gives templates (chat_template_utils.py).
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(source)
        except TemplateError as error:
            raise RenderingFault(f"the chat template of {self.path} is wrong: {error}") from error


def _without_added_tokens(full: Tokenizer) -> Tokenizer:
    """Return the same tokenizer to which added tokens are text; both share their vocabulary."""
    plain = Tokenizer(full.model)
    # None of them is no parts: these cannot be assigned.
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(full, part) is not None:
            setattr(plain, part, getattr(full, part))
    return plain


class _GenerationBlock(Extension):
    """Accept `{% generation %}`, which marks assistant text for training masks."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_written_arguments(message: Any) -> Any:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = _to_json(function.get("arguments"))
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kw: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kw)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
