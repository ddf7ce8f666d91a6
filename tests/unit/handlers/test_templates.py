"""Prompt texts as templates: rendered with what a task may tell, bounded, errors by line."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.handlers.base import InvalidAgentSettings
from rollouts.handlers.prompt import (
    PromptTexts,
    check_prompt,
    plain_settings,
    prompt_messages,
    render_prompt,
    render_tool_settings,
)
from rollouts.handlers.template_meter import MAX_OUTPUT_CHARACTERS
from rollouts.handlers.templates import InvalidTemplate, render

VARIABLES: dict[str, Any] = {
    "instruction": "Mend {{ it }} in {braces}.",
    "task": {"ref": "t1", "metadata": {"difficulty": "hard"}, "files": ["a.py"]},
    "environment": "shell@3",
    "workdir": "/app",
    "tools": [{"name": "bash", "description": "Run."}],
}


def texts(system_prompt: str = "", format: str = "jinja", **given: Any) -> PromptTexts:
    return PromptTexts(
        format=format,
        system_prompt=system_prompt,
        settings=given.get("settings", {}),
        tool_settings=given.get("tool_settings", {}),
    )


def test_plain_texts_stay_as_they_are_braces_and_all() -> None:
    settings = {"instruction_template": "{{ x }} {% y %} {instruction}"}
    given = texts("Use {{ this }} and {%", "plain", settings=settings)
    check_prompt(given)

    assert prompt_messages(render_prompt(given, VARIABLES)) == [
        {"role": "system", "content": "Use {{ this }} and {%"},
        {"role": "user", "content": "{{ x }} {% y %} Mend {{ it }} in {braces}."},
    ]


def test_templates_say_what_a_task_may_tell_and_the_task_is_never_one() -> None:
    given = texts(
        "In {{ workdir }}:{% for tool in tools %} {{ tool.name }}{% endfor %}\n",
        settings={
            "instruction_template": "{{ task.ref }} ({{ task.metadata.difficulty }}): "
            "{{ instruction }} {instruction}",
            "demonstrations": [
                [
                    {"role": "user", "content": "{{ environment }}"},
                    {"role": "assistant", "content": "{{ task.files|join }}"},
                ]
            ],
            "max_turns": 3,
        },
        tool_settings={"bash": {"description": "Run in {{ workdir }}.", "output_bytes": 300}},
    )
    check_prompt(given)

    assert prompt_messages(render_prompt(given, VARIABLES)) == [
        {"role": "system", "content": "In /app: bash\n"},
        {"role": "user", "content": "shell@3"},
        {"role": "assistant", "content": "a.py"},
        {"role": "user", "content": "t1 (hard): Mend {{ it }} in {braces}. {instruction}"},
    ]
    assert render_tool_settings(given, VARIABLES) == {
        "bash": {"description": "Run in /app.", "output_bytes": 300}
    }
    assert set(plain_settings(given)) == {"demonstrations", "max_turns"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\nb {{ c", "system_prompt, line 2: unexpected end of template"),
        ("a\n{{ hidden }}", "system_prompt, line 2: there is no variable 'hidden'; known are env"),
        ("\n\n{{ workdir|shout }}", "system_prompt, line 3: No filter named 'shout'"),
        ("{{ tools[0]|random }}", "No filter named 'random'"),
        ("\n{% include 'x' %}", "system_prompt, line 2: other templates cannot be loaded"),
        ("\n{{ tools.nothing.more }}", "system_prompt, line 2: .* has no attribute 'nothing'"),
        ("\n{{ workdir + 1 }}", "system_prompt, line 2: TypeError"),
        ("\n{{ workdir.__class__.__mro__ }}", "system_prompt, line 2: .* unsafe"),
        ("{{ tools.append(1) }}", "attribute .append. of .list. object is unsafe"),
        ("{% for n in range(10**9) %}{% endfor %}", "range gives more than 10000 numbers"),
        (
            "{% for a in range(200) %}{% for b in range(200) %}{% endfor %}{% endfor %}",
            "range gives more than 10000 numbers",
        ),
        ("{{ 'x' * 10**9 }}", "a repeated text is too long"),
        ("{{ 10**10**10 }}", "a power is too large"),
        (
            "{% set x = 'x' * 2000000 %}{{ x }}{{ x }}",
            f"it says more than {MAX_OUTPUT_CHARACTERS} characters",
        ),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("x" * 200_001, "has more than 200000 characters"),
    ],
)
def test_what_is_wrong_is_told_when_it_is_saved(text: str, reason: str) -> None:
    with pytest.raises(InvalidTemplate, match=reason):
        check_prompt(texts(text))


def test_each_text_is_checked_by_its_name() -> None:
    demonstration = [{"role": "user", "content": "{{"}, {"role": "assistant", "content": ""}]
    for given, reason in [
        (texts(settings={"instruction_template": "{{"}), "instruction_template, line 1"),
        (texts(settings={"demonstrations": [demonstration]}), "demonstrations, message 0, line 1"),
        (texts(tool_settings={"bash": {"description": "{{"}}), "description of bash, line 1"),
        (texts(tool_settings={"bash": {"description": "{{ tools }}"}}), "no variable 'tools'"),
    ]:
        with pytest.raises(InvalidTemplate, match=reason):
            check_prompt(given)
    with pytest.raises(InvalidAgentSettings, match="'instruction_template' must be a text"):
        check_prompt(texts(settings={"instruction_template": 1}))


def test_what_only_a_task_can_tell_is_found_when_it_is_rendered() -> None:
    text = "x\n{{ task.metadata.owner }}"
    check_prompt(texts(text))
    with pytest.raises(InvalidTemplate, match="line 2: 'dict object' has no attribute 'owner'"):
        render("system_prompt", text, VARIABLES)
