"""End the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts.tools.base import Tool, ToolContext, ToolResult

MAX_ANSWER_CHARACTERS = 1_000_000


class SubmitTool(Tool):
    """Offer the policy to say that it is done, with an answer where the task asks for one."""

    name = "submit"
    description = "Say that the task is done; give the answer if the task asks for one."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "answer": {
                "type": ["string", "null"],
                "maxLength": MAX_ANSWER_CHARACTERS,
                "description": "The answer, when the task asks for one.",
            }
        },
        "additionalProperties": False,
    }

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:  # noqa: ARG002
        """Finish with the answer; None when none was given."""
        self.check(arguments)
        return ToolResult(content="Submitted.", finished=True, answer=arguments.get("answer"))
