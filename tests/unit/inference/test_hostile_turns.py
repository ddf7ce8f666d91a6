"""Turns of a policy that loops or writes what nobody can carry on: read in one pass, complained of.

Sizes are such that a reader whose time grows with the square would not come to an end.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollouts.handlers.dialects import MANY_BLOCKS, Turn, assistant_message, read_block
from rollouts.handlers.one_line import parse_one_line
from rollouts.inference.look_alikes import control_pattern
from rollouts.inference.openai_chat import _answer
from rollouts.inference.parsed import ParsedTurn, ToolCall
from rollouts.inference.parsing import dialects
from rollouts.inference.parsing.attempts import (
    MALFORMED,
    MAX_ATTEMPTS,
    Attempt,
    as_calls,
    from_object,
    too_many,
)
from rollouts.inference.parsing.fences import fenced_blocks
from rollouts.inference.parsing.marked import MarkedText
from rollouts.inference.parsing.values import MAX_DEPTH, MAX_NAME_CHARACTERS
from rollouts.inference.protocol import Server
from rollouts.inference.tokenizer_folder import ControlToken
from rollouts.text import clean_json

MANY = 100_000
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


class Words:
    """A vocabulary whose ids are characters, but for the marks."""

    def __init__(self, *marks: str, special: bool = False) -> None:
        self.control = tuple(
            ControlToken(-1 - place, text, special, False, False)
            for place, text in enumerate(marks)
        )

    def decode(self, ids: list[int], **_options: bool) -> str:
        return "".join(map(chr, ids))


def marked(text: str, *tokens: str, times: int = 1) -> MarkedText:
    """Return the text, then the tokens this many times, each followed by a space."""
    folder = Words(*tokens)
    ids = [*map(ord, text), *[n for token in folder.control for n in (token.id, 32)] * times]
    return MarkedText(folder, ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("```bash\n" * MANY, 0),
        ("```bash\nls\n```\n" * MANY, MANY),
        ("```bash\nls\n" * MANY + "```", 1),
        ("```\n" * MANY, 0),
        ("``` bash\nls\n```", 0),
        (" \t```sh \nls\n\t```  ", 1),
        ("```bash\n```", 1),
        ("```bash\nls ```\n", 0),
    ],
)
def test_blocks_are_found_in_one_pass(text: str, count: int) -> None:
    blocks = fenced_blocks(text, ("bash", "sh"))

    assert len(blocks) == count
    parsed = ParsedTurn(text)
    action = read_block(Turn(text=lambda: text, parsed=lambda: parsed, complete=True))
    if count > 1:
        assert action.text == MANY_BLOCKS.format(count=count)


def test_a_block_holds_its_lines_as_they_are() -> None:
    text = "so:\n```bash\n  a\n\n```sh\nb\n```\nx\n```sh\nc\n```"

    assert fenced_blocks(text, ("bash", "sh")) == ["  a\n\n```sh\nb\n", "c\n"]


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=a></parameter>x" * MANY,
        "<parameter=a>" + "</parameter>x" * MANY,
        "<parameter=" * MANY,
        "<parameter=a>" + "</parameter>" + " " * MANY + "x",
    ],
)
def test_broken_parameters_are_complained_of_in_one_pass(body: str) -> None:
    text = f"<tool_call><function=bash>{body}</function></tool_call>"

    _, attempts = dialects.qwen3_coder(marked(text), 0, TOOLS)

    assert [(each.name, each.complaint) for each in attempts] == [("bash", MALFORMED)]


def test_a_thousand_closing_marks_in_a_value_are_read_in_one_pass() -> None:
    value = "</tool_call>" * MANY
    text = f"<tool_call><function=bash><parameter=a>{value}</parameter></function></tool_call>"

    _, (attempt,) = dialects.qwen3_coder(marked(text), 0, TOOLS)

    assert (attempt.name, attempt.arguments, attempt.complaint) == ("bash", {"a": value}, "")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</parameter>\n", {"a": "1", "b": "x"}),
        ("<parameter=a>x</parameter> y</parameter>", {"a": "x</parameter> y"}),
        ("<parameter=a>1 > 0</parameter>", {"a": "1 > 0"}),
        ("<parameter=>1</parameter>", None),
        ("<parameter=a>1", None),
        ("words <parameter=a>1</parameter>", None),
        ("<parameter=a\n>1</parameter>", None),
    ],
)
def test_parameters_are_read_as_before(body: str, arguments: dict[str, str] | None) -> None:
    text = f"<tool_call>\n<function=bash>{body}</function>\n</tool_call>"

    _, (attempt,) = dialects.qwen3_coder(marked(text), 0, TOOLS)

    assert (attempt.arguments, attempt.complaint == "") == (arguments, arguments is not None)


def test_thousands_of_mark_tokens_are_found_in_one_pass() -> None:
    end, attempts = dialects.hermes(
        marked("so ", "<tool_call>", "</tool_call>", times=20_000), 0, None
    )

    assert (end, len(attempts)) == (3, MAX_ATTEMPTS + 1)
    assert attempts[-1].complaint == "Only 128 calls of one turn are read. Write fewer."
    end, attempts = dialects.mistral(marked("so ", "[TOOL_CALLS]", times=20_000), 0, None)
    assert (end, len(attempts), attempts[-1]) == (3, MAX_ATTEMPTS + 1, too_many())
    _, attempts = dialects.llama3_json(marked('{"name": "bash"}; ' * 20_000), 0, None)
    assert (len(attempts), attempts[-1]) == (MAX_ATTEMPTS + 1, too_many())


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ("function<｜tool▁sep｜>bash\n```json\n{}\n```", "bash", {}),
        ("function<｜tool▁sep｜>\n bash \n```json\n{}```\n ", "bash", {}),
        ("function<｜tool▁sep｜>" + " " * MANY + "\n```json\n" + " " * MANY, "function", None),
        ("function<｜tool▁sep｜>\n```json\n{}\n```", "", None),
    ],
)
def test_deepseeks_fence_is_read_in_one_pass(
    body: str, name: str, arguments: dict[str, Any] | None
) -> None:
    text = f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>"

    _, (attempt,) = dialects.deepseek(marked(text), 0, None)

    assert (attempt.name, attempt.arguments) == (name, arguments)
    assert (attempt.complaint == "") == (arguments is not None)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("```bash ls -a```", "ls -a"),
        ("```ls bash x```", "ls bash x"),
        ("```bash```", "bash"),
        ("```bash" + " " * MANY + "x", "```bash" + " " * MANY + "x"),
    ],
)
def test_one_line_is_read_in_one_pass(line: str, command: str) -> None:
    assert parse_one_line(line, complete=True).text == command


def test_white_space_before_control_tokens_is_walked_along_once() -> None:
    pattern = control_pattern([ControlToken(7, "<a>", True, True, True)])

    found = [match.span() for match in pattern.finditer("x" + " " * MANY + "y  <a>  <a> <a>")]

    assert found == [(MANY + 2, MANY + 9), (MANY + 9, MANY + 13), (MANY + 13, MANY + 16)]


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


UNUSABLE = [
    ('{"a": NaN}', "a number that is not finite"),
    ('{"a": [1e999]}', "a number that is not finite"),
    ('{"a": {"b": -Infinity}}', "a number that is not finite"),
    ('{"a": "\\ud800"}', "half of a surrogate pair"),
    ('{"\\udc00": 1}', "half of a surrogate pair"),
    ('{"a": ["x\\u0000"]}', "a NUL character"),
    (deep(MAX_DEPTH + 2), f"values nested more than {MAX_DEPTH} deep"),
    (deep(900), f"values nested more than {MAX_DEPTH} deep"),
]


def of_template(arguments: str) -> ToolCall:
    text = f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'
    _, attempts = dialects.hermes(marked(text), 0, None)
    return as_calls(attempts, [1], TOOLS)[0]


def of_chat(arguments: str) -> ToolCall:
    call = {"id": "c1", "function": {"name": "bash", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    body = {"choices": [{"message": message, "finish_reason": "stop"}]}
    return _answer(body, Server("s", "http://s", "openai", "m"), 0.1).parsed.calls[0]


@pytest.mark.parametrize("read", [of_template, of_chat])
@pytest.mark.parametrize(("arguments", "what"), UNUSABLE)
def test_what_cannot_be_carried_on_is_complained_of(
    read: Callable[[str], ToolCall], arguments: str, what: str
) -> None:
    call = read(arguments)

    assert (call.name, call.arguments) == ("bash", None)
    assert call.complaint == f"The arguments of bash hold {what}. Write them again without it."


@pytest.mark.parametrize("read", [of_template, of_chat])
def test_what_can_be_carried_on_is(read: Callable[[str], ToolCall]) -> None:
    arguments = '{"a": [1, -2.5, true, null, "\\ud83d\\ude00"], "b": ' + deep(MAX_DEPTH - 1) + "}"

    call = read(arguments)

    assert (call.arguments, call.complaint) == (json.loads(arguments), "")
    assert clean_json(call.as_dict()) == call.as_dict()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ('b"x"', "a bytes, which JSON does not have"),
        ("{1, 2}", "a set, which JSON does not have"),
        ("1j", "a complex, which JSON does not have"),
        ("...", "a ellipsis, which JSON does not have"),
        ("(1, 2)", "a tuple, which JSON does not have"),
        ("{(1, 2): 3}", "a name that is no string"),
        ("{1: 2}", "a name that is no string"),
        ("'\\ud800'", "half of a surrogate pair"),
        ("1e999", "a number that is not finite"),
    ],
)
def test_python_that_is_no_json_is_complained_of(value: str, what: str) -> None:
    _, attempts = dialects.llama3_json(marked(f"<|python_tag|>bash.call(a={value})"), 0, TOOLS)

    (call,) = as_calls(attempts, [1], TOOLS)

    assert call.complaint == f"The arguments of bash hold {what}. Write them again without it."
    message = assistant_message(ParsedTurn("", None, (call,)))
    assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": "{}"}


@pytest.mark.parametrize("text", ["-" * 19_000 + "1", "a" + ".a" * 9_000, "(" * 5_000, "x" * MANY])
def test_python_that_is_nonsense_is_malformed(text: str) -> None:
    _, (attempt,) = dialects.llama3_json(marked(f"<|python_tag|>{text}"), 0, TOOLS)

    assert attempt.complaint == MALFORMED


def test_names_and_ids_are_cleaned_and_bounded() -> None:
    given = {"name": "\ud800l\0s" + "x" * 500, "id": "a\ud800", "arguments": {}}

    unknown, no_id, long_id = as_calls(
        [
            from_object(given),
            Attempt("bash", {}, id="i\0"),
            Attempt("bash", {}, id="i" * 129),
        ],
        [1],
        TOOLS,
    )

    name = "?l\ufffds" + "x" * (MAX_NAME_CHARACTERS - 4)
    assert (unknown.name, unknown.complaint) == (
        name,
        f"There is no tool named {name}. Your tools are: bash.",
    )
    assert [len(call.id) for call in (unknown, no_id, long_id)] == [9, 9, 9]
    kept = as_calls([Attempt("bash", {}, id="call_1")], [1], TOOLS)
    assert kept[0].id == "call_1"


def test_a_chat_answer_holds_whole_characters() -> None:
    call = {"id": "\ud800", "function": {"name": "l\ud800", "arguments": ""}}
    message = {"content": "a\ud800", "reasoning": "b\0", "tool_calls": [call]}
    body = {"choices": [{"message": message, "finish_reason": "stop"}]}

    parsed = _answer(body, Server("s", "http://s", "openai", "m"), 0.1).parsed

    assert parsed == ParsedTurn("a?", "b\ufffd", (ToolCall("call_0", "l?", {}),))


def test_half_of_a_surrogate_pair_can_be_tokenised(tokenizer_folder: Path) -> None:
    from rollouts.inference.tokenizer_folder import TokenizerFolder

    folder = TokenizerFolder(tokenizer_folder)

    assert folder.encode_text("a\ud800b") == folder.encode_text("a?b")
    assert folder.encode_with_control("a\ud800b") == folder.encode_with_control("a?b")
