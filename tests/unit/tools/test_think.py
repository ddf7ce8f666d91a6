"""Thinking: recorded, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.tools.base import InvalidArguments, ToolContext, ToolResult
from rollouts.tools.think import ThinkTool


def test_a_thought_is_recorded_and_changes_nothing() -> None:
    observed = ThinkTool().call({"thought": "first ls"}, ToolContext(timeout_seconds=1))
    assert observed == ToolResult(
        content="Your thought is written down.", data={"thought": "first ls"}
    )


@pytest.mark.parametrize("arguments", [{}, {"thought": ""}, {"thought": 1}, {"idea": "x"}])
def test_what_is_no_thought_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments, match="The arguments of think are wrong"):
        ThinkTool().call(arguments, ToolContext(timeout_seconds=1))
