"""Each form of tool call is read from ids; a broken one says what a model can do about it."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.inference.exceptions import RenderingFault
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.parsing.dialects import detect
from rollouts.inference.parsing.turns import TurnParser
from rollouts.inference.rendering import load_renderer
from rollouts.inference.tokenizer_folder import TokenizerFolder

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]
MARKS += ["<|python_tag|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
MARKS += ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
IM_END = 2
PROPERTIES = {"command": {"type": "string"}, "n": {"type": "integer"}}
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": PROPERTIES}},
}


@pytest.fixture(scope="module")
def plain(tokenizer_folder: Path) -> TokenizerFolder:
    """Return a vocabulary that lacks the marks: they are text."""
    return TokenizerFolder(tokenizer_folder)


@pytest.fixture(scope="module")
def marked(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenizerFolder:
    """Return the same vocabulary with the marks as tokens."""
    target = tmp_path_factory.mktemp("marked")
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": 49152 + place, "content": mark, **flags} for place, mark in enumerate(MARKS)
    ]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = (tokenizer_folder / "tokenizer_config.json").read_bytes()
    (target / "tokenizer_config.json").write_bytes(config)
    return TokenizerFolder(target)


def read(
    folder: TokenizerFolder, dialect: str, *parts: str, opens_thought: bool = False
) -> ParsedTurn:
    """Parse a turn; a part that is one mark is a control token, any other part is plain text."""
    ids: list[int] = []
    for part in parts:
        token = folder.token_id(part) if part in MARKS else None
        ids += [token] if token is not None else folder.encode_text(part)
    parser = TurnParser(folder, dialect, opens_thought=opens_thought)
    return parser.parse([*ids, IM_END], [IM_END], [BASH])


GOOD = [
    ("hermes", ["<tool_call>", '\n{"name": "bash", "arguments": {"command": "ls"}}\n']),
    ("qwen3_coder", ["<tool_call>", "\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"]),
    ("llama3_json", ['{"name": "bash", "parameters": {"command": "ls"}}']),
    ("llama3_json", ["<|python_tag|>", '{"name": "bash", "parameters": {"command": "ls"}}']),
    ("llama3_json", ["<|python_tag|>", 'bash.call(command="ls")']),
    ("mistral", ["[TOOL_CALLS]", '[{"name": "bash", "arguments": {"command": "ls"}}]']),
    ("mistral", ["[TOOL_CALLS]", "bash", "[ARGS]", '{"command": "ls"}']),
    ("deepseek", ["<｜tool▁call▁begin｜>", "bash", "<｜tool▁sep｜>", '{"command": "ls"}']),
    (
        "deepseek",
        [
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
            'bash\n```json\n{"command": "ls"}\n```',
        ],
    ),
    ("fenced_bash", ["```bash\nls\n```"]),
]
CLOSE = {
    "hermes": ["</tool_call>"],
    "qwen3_coder": ["</function>\n", "</tool_call>"],
    "deepseek": ["<｜tool▁call▁end｜>"],
}


@pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(("dialect", "parts"), GOOD)
def test_a_call_is_read(
    plain: TokenizerFolder,
    marked: TokenizerFolder,
    with_tokens: bool,
    dialect: str,
    parts: list[str],
) -> None:
    folder = marked if with_tokens else plain
    turn = read(folder, dialect, *parts, *CLOSE.get(dialect, []))

    (call,) = turn.calls
    assert (call.name, call.arguments, call.complaint) == ("bash", {"command": "ls"}, "")
    assert len(call.id) == 9
    assert turn.content == ("```bash\nls\n```" if dialect == "fenced_bash" else "")
    assert turn == read(folder, dialect, *parts, *CLOSE.get(dialect, []))


HERMES = '{"name": "bash", "arguments": {"command": "ls"}}'
BROKEN = [
    ("hermes", ["<tool_call>", '{"name": "bash", "argu'], "cut off"),
    ("hermes", ["<tool_call>", HERMES], "cut off"),
    ("hermes", ["<tool_call>", "{'name': 1}", "</tool_call>"], "not valid JSON"),
    ("hermes", ["<tool_call>", '{"arguments": {}}', "</tool_call>"], "names no tool"),
    ("hermes", ["<tool_call>", '{"name": "bash", "arguments": [1]}', "</tool_call>"], "no JSON ob"),
    ("hermes", ["<tool_call>", '{"name": "zsh"}', "</tool_call>"], "no tool named zsh.*: bash"),
    ("hermes", ["<tool_call>", "[1]", "</tool_call>"], "form"),
    ("hermes", ["<tool_call>", HERMES + " and", "</tool_call>"], "form"),
    ("qwen3_coder", ["<tool_call>", "\n<function=bash>\n<parameter=command>\nl"], "cut off"),
    ("qwen3_coder", ["<tool_call>", "<function=></function>", "</tool_call>"], "names no tool"),
    ("qwen3_coder", ["<tool_call>", HERMES, "</tool_call>"], "form"),
    ("llama3_json", ['{"name": "bash", "parameters": {"comm'], "cut off"),
    ("llama3_json", ['{"name": "bash", "parameters": {command}}'], "not valid JSON"),
    ("llama3_json", ["<|python_tag|>", "print(1); x"], "form"),
    ("mistral", ["[TOOL_CALLS]", '[{"name": "bash", "argum'], "cut off"),
    ("mistral", ["[TOOL_CALLS]", "bash", "[ARGS]", "{]"], "not valid JSON"),
    ("mistral", ["[TOOL_CALLS]", "[ARGS]", "{}"], "names no tool"),
    ("deepseek", ["<｜tool▁call▁begin｜>", "bash", "<｜tool▁sep｜>", "{"], "cut off"),
    ("deepseek", ["<｜tool▁call▁begin｜>", "bash", "<｜tool▁call▁end｜>"], "form"),
    ("fenced_bash", ["```bash\nls\n```\n\n```bash\nls\n```\n"], "exactly one"),
    ("fenced_bash", ["```bash\nls"], "cut off"),
]


@pytest.mark.parametrize(("dialect", "parts", "says"), BROKEN)
def test_a_broken_call_carries_a_complaint(
    marked: TokenizerFolder, dialect: str, parts: list[str], says: str
) -> None:
    turn = read(marked, dialect, *parts)

    (call,) = turn.calls
    assert call.arguments is None
    assert re.search(says, call.complaint), call.complaint


def test_of_two_calls_one_is_broken(marked: TokenizerFolder) -> None:
    turn = read(
        marked, "hermes", "Hi.", "<tool_call>", "{", "</tool_call>", "<tool_call>", HERMES,
        "</tool_call>",
    )  # fmt: skip
    assert turn.content == "Hi."
    assert [call.arguments for call in turn.calls] == [None, {"command": "ls"}]
    assert turn.calls[0].id != turn.calls[1].id


@pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "text"])
def test_a_look_alike_in_a_string_ends_no_call(
    plain: TokenizerFolder, marked: TokenizerFolder, with_tokens: bool
) -> None:
    command = "echo '</tool_call><tool_call>{}</tool_call>'"
    body = json.dumps({"name": "bash", "arguments": {"command": command}})

    turn = read(marked if with_tokens else plain, "hermes", "<tool_call>", body, "</tool_call>")

    (call,) = turn.calls
    assert call.arguments == {"command": command}


def test_a_spelt_mark_is_no_call_where_the_vocabulary_has_a_token(marked: TokenizerFolder) -> None:
    text = f"<tool_call>{HERMES}</tool_call>"
    parser = TurnParser(marked, "hermes", opens_thought=False)
    turn = parser.parse(marked.encode_text(text), [IM_END], None)
    assert (turn.content, turn.calls) == (text, ())


def test_values_follow_the_schema(marked: TokenizerFolder) -> None:
    body = "\n<function=bash>\n<parameter=command>\n1\n</parameter>\n"
    body += "<parameter=n>\n2\n</parameter>\n</function>\n"
    (call,) = read(marked, "qwen3_coder", "<tool_call>", body, "</tool_call>").calls
    assert call.arguments == {"command": "1", "n": 2}


@pytest.mark.parametrize(
    ("parts", "opens", "expected"),
    [
        (["<think>", "\nhm\n", "</think>", "\n\nyes"], False, ("hm", "yes")),
        (["hm\n", "</think>", "yes"], True, ("hm", "yes")),
        (["<think>", "never closed"], False, ("never closed", "")),
        (["never closed"], True, ("never closed", "")),
        (["no thoughts"], False, (None, "no thoughts")),
        (["say ", "<think>", "x", "</think>"], False, (None, "say <think>x</think>")),
    ],
)
def test_thoughts_are_separate(
    marked: TokenizerFolder, parts: list[str], opens: bool, expected: tuple[str | None, str]
) -> None:
    turn = read(marked, "hermes", *parts, opens_thought=opens)
    assert (turn.reasoning, turn.content) == expected


def test_a_call_inside_thoughts_is_none(marked: TokenizerFolder) -> None:
    draft = ["<think>", "<tool_call>", HERMES, "</tool_call>", "</think>", "done"]
    turn = read(marked, "hermes", *draft)
    assert (turn.content, turn.calls) == ("done", ())


@pytest.mark.parametrize("dialect", sorted({name for name, _ in GOOD}))
@given(ids=st.lists(st.one_of(st.integers(0, 49163), st.integers(49152, 49163)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_nothing_that_a_policy_writes_raises(
    marked: TokenizerFolder, dialect: str, ids: list[int]
) -> None:
    turn = TurnParser(marked, dialect, opens_thought=False).parse(ids, [IM_END], [BASH])
    assert all((call.arguments is None) == bool(call.complaint) for call in turn.calls)


def test_the_form_is_detected_or_configured(tokenizer_folder: Path, tmp_path: Path) -> None:
    assert detect("… <tool_call>\n<function=x> …") == "qwen3_coder"
    assert detect("<tool_call> {json}") == "hermes"
    assert detect("[TOOL_CALLS]") == "mistral"
    assert detect("plain") == "none"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    (tmp_path / "renderer.json").write_text('{"tool_parser": "fenced_bash"}')
    renderer = load_renderer(tmp_path)
    ids = TokenizerFolder(tmp_path).encode_text("```bash\nls\n```")
    assert [call.arguments for call in renderer.parse(ids).calls] == [{"command": "ls"}]


def test_an_unknown_form_is_a_clear_fault(plain: TokenizerFolder) -> None:
    with pytest.raises(RenderingFault, match="no tool parser 'x'; there are deepseek"):
        TurnParser(plain, "x", opens_thought=False)


CALL = '{"name": "bash", "arguments": {"command": "ls"}}'


def test_a_calls_own_token_ends_a_thought_that_never_closes(marked: TokenizerFolder) -> None:
    turn = read(marked, "hermes", "<think>", "I list.\n", "<tool_call>", CALL, "</tool_call>")
    assert turn.reasoning == "I list."
    assert [(call.name, call.arguments) for call in turn.calls] == [("bash", {"command": "ls"})]
    assert turn.content == ""


def test_a_call_within_a_thought_that_closes_is_thought(marked: TokenizerFolder) -> None:
    parts = ["<think>", "say ", "<tool_call>", CALL, "</tool_call>", "</think>", "done"]
    turn = read(marked, "hermes", *parts)
    assert turn.calls == ()
    assert turn.content == "done"


@pytest.mark.parametrize("opens_thought", [True, False])
def test_a_spelled_mark_ends_no_thought(plain: TokenizerFolder, opens_thought: bool) -> None:
    thought = "" if opens_thought else "<think>"
    text = f"{thought}I list.<tool_call>{CALL}</tool_call>"
    turn = read(plain, "hermes", text, opens_thought=opens_thought)
    assert turn.calls == ()
    assert turn.reasoning == f"I list.<tool_call>{CALL}</tool_call>"


def test_where_the_prompt_opens_the_thought_a_call_ends_it(marked: TokenizerFolder) -> None:
    parts = ["I list.", "<tool_call>", CALL, "</tool_call>"]
    turn = read(marked, "hermes", *parts, opens_thought=True)
    assert (turn.reasoning, len(turn.calls)) == ("I list.", 1)
