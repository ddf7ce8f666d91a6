"""What a sampled turn says, once its tokens are read: text, thoughts and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Hold one call of a tool, as the policy wrote it.

    `arguments` is None when the call could not be read; `complaint` then says what was wrong
    with it, in words that the policy can act on. `id` is what the model itself gave, else made up.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    complaint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the call as JSON."""
        return {
            "id": self.id,
            "name": self.name,
            "arguments": None if self.arguments is None else dict(self.arguments),
            "complaint": self.complaint,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ToolCall":
        """Rebuild a call from its JSON."""
        return cls(data["id"], data["name"], data["arguments"], data["complaint"])


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Hold one turn, read: `content` without thoughts and calls, `reasoning` None where none is."""

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = field(default_factory=tuple)
