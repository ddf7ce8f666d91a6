"""Sampled thoughts stay as they were sampled, or the conversation is rendered anew: one chooses."""

from typing import Any

import pytest

from rollouts.inference.exceptions import CannotExtend
from rollouts.inference.template_renderer import TemplateRenderer
from tests.unit.inference.real_templates import template_renderer

USER = {"role": "user", "content": "List the files."}
AGAIN = {"role": "user", "content": "And the sizes?"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "bash", "content": "a.txt"}
THOUGHT = "<think>\nhidden words\n</think>\n\na.txt<|im_end|>"
PARSED = {"role": "assistant", "reasoning_content": "hidden words", "content": "a.txt"}


def sampled(renderer: TemplateRenderer, text: str = THOUGHT) -> list[int]:
    """Return what the policy sampled: its thoughts' marks are real tokens of Qwen 3."""
    ids = renderer._folder.encode_with_control(text)
    assert ids.count(renderer._folder.token_id("<think>") or -1) == text.count("<think>")
    return ids


def test_by_default_thoughts_stay_as_they_were_sampled() -> None:
    renderer = template_renderer("qwen3")
    previous = [*renderer.render([USER]), *sampled(renderer)]

    ids = renderer.bridge(previous, [AGAIN])

    assert ids[: len(previous)] == previous
    assert "hidden words" not in renderer.decode(renderer.render([USER, PARSED, AGAIN]))


@pytest.mark.parametrize(
    ("name", "text", "message", "extends"),
    [
        ("qwen3", THOUGHT, AGAIN, False),
        ("qwen3", "<think>\ncut", AGAIN, False),
        ("qwen3", THOUGHT, RESULT, True),
        ("qwen3", "a.txt<|im_end|>", AGAIN, True),
        ("qwen3_training", THOUGHT, AGAIN, True),
        ("qwen3_instruct_2507", "a.txt<|im_end|>", AGAIN, True),
    ],
)
def test_history_as_the_template_writes_it_extends_only_where_thoughts_stay(
    name: str, text: str, message: dict[str, Any], extends: bool
) -> None:
    renderer = template_renderer(name, keeps_thoughts=False)
    previous = [*renderer.render([USER]), *sampled(renderer, text)]
    if extends:
        assert renderer.bridge(previous, [message])[: len(previous)] == previous
        return
    with pytest.raises(CannotExtend, match="takes out earlier thoughts"):
        renderer.bridge(previous, [message])
