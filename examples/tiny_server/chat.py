"""Turn messages into token ids by the model's own chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.tiny_server.fields import flag, refuse


class ChatTemplate:
    """Hold the template of a tokenizer folder."""

    def __init__(self, folder: Path, encode: Callable[[str], list[int]]) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        # As transformers compiles templates: whitespace matters to the token.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _complain
        self._template = environment.from_string(config["chat_template"])
        self._names = {name: config[name] for name in ("bos_token", "eos_token")}
        self._encode = encode

    def render(self, body: dict[str, Any]) -> list[int]:
        """Return the ids of a body's `messages`; raise HttpError 400."""
        messages = _messages(body.get("messages"))
        for name in ("tools", "continue_final_message", "chat_template", "chat_template_kwargs"):
            if body.get(name):
                raise refuse(name, f"{name} is not supported: this model's template has none")
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=flag(body, "add_generation_prompt", default=True),
                **self._names,
            )
        except TemplateError as error:
            raise refuse("messages", f"the chat template refuses: {error}") from error
        return self._encode(text)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise refuse("messages", "messages must be a list with at least one message")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refuse("messages", "each message must be an object with a role")
    if message.get("tool_calls"):
        raise refuse("messages", "tool_calls are not supported: this model's template has none")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, str):
        raise refuse("messages", "content must be a text, or a list of parts of type text")
    return {"role": message["role"], "content": content}


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise refuse("messages", "only content parts of type text are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse("messages", "a part of type text needs a text")
    return text


def _complain(message: str) -> NoReturn:
    raise TemplateError(message)
