"""Let the policy write a thought down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.tools.base import Tool, ToolContext, ToolResult

MAX_THOUGHT_CHARACTERS = 100_000


class ThinkTool(Tool):
    """Offer a place to reason in: nothing runs and nothing changes.

    The thought stays in the trajectory as the call's argument and in the result's data.
    """

    name = "think"
    description = (
        "Write down a thought: a plan, what an observation means, what to try next. "
        "It changes nothing and shows you nothing new."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "thought": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_THOUGHT_CHARACTERS,
                "description": "The thought.",
            }
        },
        "required": ["thought"],
        "additionalProperties": False,
    }

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:  # noqa: ARG002
        """Record the thought."""
        self.check(arguments)
        return ToolResult(
            content="Your thought is written down.", data={"thought": arguments["thought"]}
        )
