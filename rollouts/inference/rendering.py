"""Turn messages into token ids, and extend a conversation without touching what was sampled."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.template_renderer import TemplateRenderer
from rollouts.inference.tokenizer_folder import TokenizerFolder

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_loading = threading.Lock()


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

    def bridge(
        self,
        previous_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Return the whole next prompt: `previous_ids` untouched, then the template's tokens.

        Raises CannotExtend where the template cannot do so exactly.
        """
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[Tool] | None = None) -> ParsedTurn:
        """Return what a sampled turn says; a broken call carries a complaint, nothing raises."""
        ...

    def count(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> int:
        """Return how many tokens the rendered prompt has."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens left out."""
        ...


def load_renderer(path: str | Path) -> ConversationRenderer:
    """Load the renderer of a tokenizer folder, once per process; raise RenderingFault.

    The folder's chat template renders, unless a `renderer.json` in it names a family of the
    package `renderers`: `{"family": "qwen3", "options": {"enable_thinking": false}}`. With the
    template, `{"tool_parser": "hermes"}` names the form of tool calls; else it is detected.
    `{"history": "template"}` lets neither keep thoughts that the template takes out of earlier
    turns: such a conversation is rendered anew; by default (`sampled`) what was sampled stays.
    """
    # The rollouts of a first round ask together: each would load one, 64 MB and more, at once.
    with _loading:
        return _load(str(Path(path).resolve()))


@lru_cache(maxsize=16)
def _load(path: str) -> ConversationRenderer:
    choice = _choice(Path(path) / "renderer.json")
    folder = TokenizerFolder(Path(path))
    keeps_thoughts = choice.get("history") != "template"
    if choice.get("family") is None:
        return TemplateRenderer(folder, choice.get("tool_parser"), keeps_thoughts=keeps_thoughts)
    # Costs a second of import that a template does not need.
    from rollouts.inference.families import FamilyRenderer

    retention = {"thinking_retention": "all" if keeps_thoughts else "tool_cycle"}
    options = {**retention, **(choice.get("options") or {})}
    return FamilyRenderer(folder, choice["family"], options)


def _choice(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        choice: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RenderingFault(f"{file} is not JSON: {error}") from error
    keys = ("family", "tool_parser", "history")
    named = [choice.get(key) for key in keys] if isinstance(choice, dict) else []
    if not any(named) or not all(isinstance(name, str | None) for name in named):
        raise RenderingFault(f"{file} is no JSON object that names one of: {', '.join(keys)}")
    if choice.get("history") not in (None, "sampled", "template"):
        raise RenderingFault(f"{file}: history is sampled or template, not {choice['history']!r}")
    return dict(choice)
