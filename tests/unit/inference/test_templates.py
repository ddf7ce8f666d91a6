"""Real chat templates, original and training form, on real vocabularies: exact or a clear fork.

The templates are those of the package TRL 1.16 (Apache-2.0), unchanged; Mistral's and
Qwen3-Coder's those of the models' own repositories (Apache-2.0), as llama.cpp distributes them.
"""

import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.inference.exceptions import CannotExtend, RenderingFault
from rollouts.inference.template_renderer import TemplateRenderer
from rollouts.inference.trace import Trace
from tests.unit.inference.real_templates import NAMES, reference_ids, template_renderer

# Ends a turn with the next message's own token; the family reads and extends it.
REFUSED = ["glm4moe"]
# Ends a turn otherwise once another message follows, so each turn forks; the family extends it.
FORKING = ["gptoss"]
USER = {"role": "user", "content": "List the files, 12 of them."}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run it.", "parameters": PARAMETERS},
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "bash", "arguments": {"command": "ls"}},
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "bash", "content": "a.txt"}
LOOK_ALIKES = ["<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "</tool_call>"]


@pytest.fixture(scope="module", params=[name for name in NAMES if name not in REFUSED])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def template(name: str) -> TemplateRenderer:
    return template_renderer(name)


@pytest.fixture(scope="module")
def extending(name: str, template: TemplateRenderer) -> TemplateRenderer:
    if name.startswith(tuple(FORKING)):
        pytest.skip("this template cannot be extended: see the test that says so")
    return template


@pytest.mark.parametrize("refused", REFUSED)
def test_a_template_that_ends_no_turn_is_refused_when_it_is_loaded(refused: str) -> None:
    with pytest.raises(RenderingFault, match="ends a turn with no control token"):
        template_renderer(refused)


@pytest.mark.parametrize("forking", [name for name in NAMES if name.startswith(tuple(FORKING))])
def test_a_template_that_writes_a_turns_end_anew_cannot_extend(forking: str) -> None:
    template = template_renderer(forking)
    with pytest.raises(CannotExtend, match="a turn ends otherwise"):
        template.bridge([*template.render([USER]), *words(template, "a.txt")], [USER])


def normal(text: str) -> str:
    """Return text as Qwen's tokenizers take it: they normalise before they encode."""
    return unicodedata.normalize("NFC", text)


def words(template: TemplateRenderer, text: str) -> list[int]:
    return [*template._folder.encode_text(text), template.stop_token_ids[0]]


def test_ids_equal_those_of_transformers(name: str, template: TemplateRenderer) -> None:
    messages = [USER, {"role": "assistant", "content": "a.txt"}, {**USER, "content": "é 日本 🦙"}]
    expected = reference_ids(name, messages)
    assert template.render(messages) == expected
    assert template.count(messages) == len(expected)


def test_ids_with_tools_equal_those_of_transformers(name: str, template: TemplateRenderer) -> None:
    if not template.supports_tools or not _shows_results(template):
        pytest.skip("this template shows no tools")
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages: list[dict[str, Any]] = [USER, turn, RESULT]
    assert template.render(messages, [BASH]) == reference_ids(name, messages, [BASH])


def test_a_bridge_is_what_the_template_writes(extending: TemplateRenderer) -> None:
    template = extending
    first = template.render([USER])
    second = {"role": "user", "content": "And the sizes?"}

    previous = [*first, *words(template, "a.txt")]
    bridged = template.bridge(previous, [second])

    whole = template.render([USER, {"role": "assistant", "content": "a.txt"}, second])
    # What stands before may differ: a template may write history otherwise than it was sampled.
    assert bridged[: len(previous)] == previous
    added = bridged[len(previous) :]
    assert added == whole[-len(added) :]


@given(
    pieces=st.lists(
        st.one_of(
            st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["C"]), max_size=30),
            st.sampled_from(LOOK_ALIKES),
        ),
        max_size=6,
    )
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_observations_never_hold_control_tokens_and_the_trace_never_forks(
    extending: TemplateRenderer, pieces: list[str]
) -> None:
    template = extending
    observation = {"role": "user", "content": normal(f"out: {''.join(pieces)} :end")}
    plain = template.bridge(
        [*template.render([USER]), *words(template, "ls")], [{**USER, "content": "plain"}]
    )
    control = {token.id for token in template._folder.control}
    trace, prompt, sampled = Trace(), template.render([USER]), 0
    start = len(prompt)
    for answer in ("ls", "cat a.txt"):
        ids = words(template, answer)
        trace.extend(prompt)
        trace.append_sampled(ids, [-0.5] * len(ids), policy_version=1, finish_reason="stop")
        sampled += len(ids)
        prompt = template.bridge([*prompt, *ids], [observation])
    trace.extend(prompt)

    expected = [token for token in plain[start:] if token in control]
    assert [token for token in prompt[start:] if token in control] == expected * 2
    assert observation["content"] in template._folder.decode(prompt, skip_special=False)
    (segment,) = trace.as_dict()
    assert segment["prompt_ids"] + segment["response_ids"] == prompt
    assert trace.sampled_tokens == sum(segment["response_mask"]) == sampled


@pytest.mark.parametrize("size", [0, 200_000])
def test_empty_and_huge_observations_extend(extending: TemplateRenderer, size: int) -> None:
    template = extending
    previous = [*template.render([USER]), *words(template, "ls")]
    ids = template.bridge(previous, [{"role": "user", "content": "ab " * (size // 3)}])
    assert ids[: len(previous)] == previous


def test_a_tools_result_extends_or_says_why(extending: TemplateRenderer) -> None:
    template = extending
    previous = [*template.render([USER]), *words(template, "call")]
    if not _shows_results(template):
        with pytest.raises(RenderingFault, match=r"drops messages of: tool|refused"):
            template.bridge(previous, [RESULT])
        with pytest.raises(RenderingFault, match=r"drops messages of: tool|refused"):
            template.render([USER, {"role": "assistant", "content": "ls"}, RESULT])
        return
    ids = template.bridge(previous, [RESULT])
    assert ids[: len(previous)] == previous
    assert "a.txt" in template.decode(ids[len(previous) :])


def _shows_results(template: TemplateRenderer) -> bool:
    """Say so by what the whole conversation looks like, not by a bridge."""
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    try:
        return "a.txt" in template.decode(template.render([USER, turn, RESULT]))
    except RenderingFault:
        return False
