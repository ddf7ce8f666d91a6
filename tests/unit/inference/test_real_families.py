"""Families of `renderers` on real vocabularies: as their templates, exact, and read with tools."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.inference.exceptions import CannotExtend
from rollouts.inference.families import FamilyRenderer
from rollouts.inference.trace import Trace
from tests.unit.inference.real_templates import reference_ids, template_folder

PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run it.", "parameters": PARAMETERS},
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "List the files, 12 of them."}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "bash", "arguments": {"command": "ls"}},
}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "bash", "content": "a.txt"}
# The template of each family, and how the family writes a call.
FAMILIES = {
    "qwen3": (
        "qwen3",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    ),
    "qwen3.5": (
        "qwen3_5_think",
        "</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "llama-3": ("llama3_1", '{"name": "bash", "parameters": {"command": "ls"}}'),
    "glm-4.5": (
        "glm4moe",
        "<think></think>\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
        "</tool_call>",
    ),
}


def normal(text: str) -> str:
    """Return text as Qwen's tokenizers take it: they normalise before they encode."""
    return unicodedata.normalize("NFC", text)


class Family:
    """A family, its template's name, and the ids of a sampled call without the stop token."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.template, written = FAMILIES[name]
        self.folder = template_folder(self.template)
        self.renderer = FamilyRenderer(self.folder, name, {"thinking_retention": "all"})
        self.call = self.folder.encode_with_control(written)

    @property
    def stop(self) -> int:
        return self.renderer.stop_token_ids[0]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([SYSTEM, USER], None),
        ([USER], [BASH]),
        ([SYSTEM, USER, TURN, RESULT], [BASH]),
        ([USER, {"role": "assistant", "content": "é 日本 🦙"}, USER], None),
    ],
    ids=["words", "tools", "a call and its result", "turns"],
)
def test_prompts_are_the_templates(
    family: Family, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    expected = reference_ids(family.template, messages, tools)
    assert family.renderer.render(messages, tools) == expected
    assert family.renderer.count(messages, tools) == len(expected)


def test_a_sampled_call_is_read(family: Family) -> None:
    (call,) = family.renderer.parse([*family.call, family.stop], [BASH]).calls
    assert (call.name, call.arguments, call.complaint) == ("bash", {"command": "ls"}, "")


def test_a_call_of_no_tool_says_which_there_are(family: Family) -> None:
    other = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
    (call,) = family.renderer.parse([*family.call, family.stop], [other]).calls
    assert (call.name, call.arguments) == ("bash", None)
    assert "Your tools are: look" in call.complaint


@given(
    observations=st.lists(
        st.one_of(
            st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["C"]), max_size=30),
            st.sampled_from(["<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|user|>"]),
        ),
        min_size=1,
        max_size=3,
    ),
    closes=st.booleans(),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_turns_with_calls_are_one_segment(
    family: Family, observations: list[str], closes: bool
) -> None:
    special = {token.id for token in family.folder.control if token.special}
    trace, prompt = Trace(), family.renderer.render([SYSTEM, USER], [BASH])
    sampled: list[int] = []
    added: list[list[int]] = []
    for content in [*map(normal, observations), "plain"]:
        ids = [*family.call, family.stop] if closes else list(family.call)
        trace.extend(prompt)
        trace.append_sampled(ids, [-0.5] * len(ids), policy_version=1, finish_reason="stop")
        sampled += ids
        previous = [*prompt, *ids]
        prompt = family.renderer.bridge(previous, [{**RESULT, "content": content}], [BASH])
        assert prompt[: len(previous)] == previous
        shown = family.folder.decode(prompt[len(previous) :], skip_special=False)
        # Llama 3 shows a result as a JSON string, its letters as they are or escaped.
        as_json = [json.dumps(content, ensure_ascii=ascii_only) for ascii_only in (True, False)]
        assert any(form in shown for form in (content.strip(), *as_json))
        added.append([token for token in prompt[len(previous) :] if token in special])
    trace.extend(prompt)

    (segment,) = trace.as_dict()
    chosen = zip(segment["response_ids"], segment["response_mask"], strict=True)
    assert [token for token, mask in chosen if mask] == sampled
    assert segment["prompt_ids"] + segment["response_ids"] == prompt
    assert all(each == added[-1] for each in added), "text became a control token"


def test_what_no_family_can_extend_is_a_fork(family: Family) -> None:
    previous = [*family.renderer.render([USER], [BASH]), *family.call, family.stop]
    with pytest.raises(CannotExtend):
        family.renderer.bridge(previous, [{"role": "assistant", "content": "mine"}], [BASH])
