"""No template takes long or fills the memory, whatever it is made of."""

import pytest

from rollouts.handlers.prompt import SAMPLE
from rollouts.handlers.template_meter import (
    MAX_MADE_CHARACTERS,
    MAX_OUTPUT_CHARACTERS,
    MAX_STEPS,
)
from rollouts.handlers.templates import InvalidTemplate, check_template, render

AT_ONCE = f"it makes more than {MAX_OUTPUT_CHARACTERS} characters at once"
MADE = f"it makes more than {MAX_MADE_CHARACTERS} characters"
SAYS = f"it says more than {MAX_OUTPUT_CHARACTERS} characters"
STEPS = f"it takes more than {MAX_STEPS} steps"
GROW = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = MORE %}{% endfor %}"


def grown(start: str, more: str) -> str:
    return GROW.replace("START", start).replace("MORE", more)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # Texts that double.
        (grown("'aaaaaaaa'", "ns.s ~ ns.s") + "{{ ns.s|length }}", "characters"),
        (grown("'aaaaaaaa'", "ns.s + ns.s"), "characters"),
        (grown("'aaaaaaaa'", "ns.s|replace('a', 'aa')"), "characters"),
        (grown("'aaaaaaaa'", "ns.s.replace('a', 'aa')"), "characters"),
        (grown("'aaaaaaaa'", "[ns.s, ns.s]|join"), "characters"),
        (grown("'aaaaaaaa'", "''.join([ns.s, ns.s])"), "characters"),
        (grown("9", "ns.s * ns.s"), "a product is too large"),
        # Lists that hold the same list twice: little memory, until somebody writes them out.
        (grown("'a'", "[ns.s, ns.s]"), AT_ONCE),
        (grown("'a'", "(ns.s, ns.s)"), AT_ONCE),
        (grown("'a'", "{'a': ns.s, 'b': ns.s}"), AT_ONCE),
        (grown("'a'", "dict(a=ns.s, b=ns.s)") + "{{ ns.s }}", AT_ONCE),
        (grown("'a'", "namespace(a=ns.s, b=ns.s)") + "{{ ns.s }}", AT_ONCE),
        ("{{ ['a' * 1000000] * 1000 }}", "a repeated text is too long"),
        # Widths.
        ("{{ '%100000000d' % 1 }}", "texts are not formatted by %"),
        ("{{ '%100000000d'|format(1) }}", "No filter named 'format'"),
        ("{{ '{:100000000}'.format(1) }}", "the method format is not at hand"),
        ("{{ 'a'|center(100000000) }}", "No filter named 'center'"),
        ("{{ 'a'.center(100000000) }}", "the method center is not at hand"),
        ("{{ 'a'.zfill(100000000) }}", "the method zfill is not at hand"),
        ("{{ (1).to_bytes(100000000, 'big') }}", "the method to_bytes is not at hand"),
        ("{{ 'a\nb'|indent(100000000) }}", "indent takes numbers up to 200"),
        ("{{ ('a\n' * 20000)|indent(200) }}", MADE),
        ("{{ ('a\n' * 20000)|indent('b' * 200) }}", MADE),
        ("{{ tools|tojson(indent=9) }}", "tojson indents by 8 at most"),
        ("{{ 1.5|round(100000000) }}", "round takes numbers up to 200"),
        ("{{ range(9000)|join('a' * 1000) }}", MADE),
        ("{{ range(9000)|map('string')|join('a' * 1000) }}", MADE),
        ("{{ ('a' * 9000)|replace('', 'b' * 9000) }}", MADE),
        # Steps that are no numbers of a range.
        (
            "{% set s = 'a' * 2000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
            STEPS,
        ),
        (
            "{% macro a(n) %}{% if n %}{{ a(n - 1) ~ a(n - 1) }}{% endif %}{% endmacro %}"
            "{{ a(60) }}",
            STEPS,
        ),
        ("{% for a in tools recursive %}{{ loop(tools) }}{% endfor %}", "cannot be recursive"),
        # Texts that are kept instead of said.
        (
            "{% set x %}{% for a in range(3000) %}" + "b" * 1000 + "{% endfor %}{% endset %}",
            SAYS,
        ),
        ("".join("{% set x" + str(n) + " = 'a' * 1999999 %}" for n in range(11)), MADE),
    ],
)
def test_it_is_refused_where_it_is_saved(text: str, reason: str) -> None:
    with pytest.raises(InvalidTemplate) as refused:
        check_template("system_prompt", text, SAMPLE)

    assert reason in str(refused.value)


def test_what_needs_a_task_is_bounded_when_it_is_rendered() -> None:
    text = "{% for a in task.text %}{% for b in task.text %}{% endfor %}{% endfor %}"
    check_template("system_prompt", text, SAMPLE)

    with pytest.raises(InvalidTemplate, match=STEPS):
        render("system_prompt", text, {**SAMPLE, "task": {"text": "a" * 1000}})


def test_what_prompts_are_made_of_works() -> None:
    text = (
        "{% macro line(tool) %}- {{ tool.name }}: {{ tool.description|indent(2) }}{% endmacro %}"
        "{% for tool in tools %}{{ loop.index }}/{{ loop.length }} {{ line(tool) }}\n{% endfor %}"
        "{{ tools|map(attribute='name')|join(', ') }}; {{ ', '.join(['a', 'b']) }}; "
        "{{ {'a': [1, 2.5]}|tojson(indent=1) }}; {{ 'a' ~ 1 ~ none }}; {{ 7 % 4 + 2 * 3 ** 2 }}; "
        "{{ environment.upper().split('@')|last }}; {{ (1, 2)|sum(start=1) }}; "
        "{{ task.get('x', 'none') }}; {% for a, b in {'k': 'v'}.items() %}{{ a }}{{ b }}"
        "{% else %}no{% endfor %}; {{ 2.345|round(1) }}; {{ ('a' * 300)|truncate(255)|length }}"
        "{% set ns = namespace(n=0) %}{% for n in range(100) %}{% set ns.n = ns.n + n %}"
        "{% endfor %}; {{ ns.n }}; {% filter upper %}x{% endfilter %}"
    )
    check_template("system_prompt", text, SAMPLE)

    assert render("system_prompt", text, SAMPLE) == (
        "1/1 - bash: Run a command.\nbash; a, b; "
        '{\n "a": [\n  1,\n  2.5\n ]\n}; a1None; 21; 1; 4; none; kv; 2.3; 255; 4950; X'
    )
