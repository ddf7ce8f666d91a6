"""The editor: pure edits, byte for byte, and what it refuses before it looks at a file."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollouts.tools.base import (
    InvalidArguments,
    InvalidToolSettings,
    ToolContext,
    ToolUnavailable,
)
from rollouts.tools.editing import (
    BinaryContent,
    Document,
    Edit,
    EditRefused,
    count_lines,
    decode,
    insert_after,
    line_ends,
    number_lines,
    replace_once,
    snippet,
    split_lines,
)
from rollouts.tools.editor import EditorTool
from rollouts.tools.editor_history import EditHistory
from rollouts.tools.registry import build_tools
from tests.unit.tools.scripted_shell import ScriptedShell

# Few characters, so that what hypothesis makes up meets itself and line ends are common.
TEXT = st.text(alphabet="ab \t\r\nä😀")
PLAIN = st.text(alphabet="ab\n")


@given(TEXT, TEXT, TEXT, TEXT)
@example("", "a", "", "b\n")
@example("x\r\n", "a\nb", "\r\ny", "c\nd")
@example("a", "aa", "", "b")
@example("", "", "a", "a")
def test_a_replacement_keeps_everything_around_it(
    before: str, old: str, after: str, new: str
) -> None:
    # A line end of two characters is one: no replacement begins or ends in its middle.
    assume(not (before.endswith("\r") and old.startswith("\n")))
    assume(not (old.endswith("\r") and after.startswith("\n")))
    text = before + old + after
    try:
        edit = replace_once(text, old, new)
    except EditRefused:
        places = [at for at in range(len(text)) if text.startswith(old, at)]
        assert len(places) != 1 or old in ("", new) or "\r\n" in text
        return
    # The only place is that one, perhaps with its line ends in the file's form.
    assert edit.text.startswith(before)
    assert edit.text.endswith(after)
    middle = edit.text[len(before) : len(edit.text) - len(after)]
    assert middle in (new, new.replace("\n", "\r\n"))


@given(TEXT, st.integers(0, 12), TEXT)
def test_an_insertion_keeps_everything_around_it(text: str, line: int, new: str) -> None:
    lines = split_lines(text)
    if line > len(lines):
        with pytest.raises(EditRefused, match=f"the file has {len(lines)} lines"):
            insert_after(text, line, new)
        return
    edit = insert_after(text, line, new)
    head, tail = "".join(lines[:line]), "".join(lines[line:])
    assert edit.text.startswith(head)
    assert edit.text.endswith(tail)
    block = new.replace("\r\n", "\n").removesuffix("\n")
    unfinished = bool(text) and not tail and not text.endswith("\n")
    forms = [block.replace("\n", end) for end in ("\n", "\r\n")]
    inserted = edit.text[len(head) : len(edit.text) - len(tail)]
    if unfinished:
        assert inserted in ("\n" + forms[0], "\r\n" + forms[1])
    else:
        assert inserted in (forms[0] + "\n", forms[1] + "\r\n")


@given(st.text())
def test_lines_together_are_the_text(text: str) -> None:
    assert "".join(split_lines(text)) == text
    assert count_lines(text) == len(split_lines(text))


@given(st.binary())
@example(b"\xef\xbb\xbf\xef\xbb\xbfa")
@example(b"\xff\xfea\x00")
@example(b"\xff\xfea")
@example(b"\xff\xfe\x00\x00a\x00\x00\x00")
@example(b"caf\xe9")
def test_any_bytes_are_binary_or_come_back_as_they_were(data: bytes) -> None:
    try:
        document = decode(data)
    except BinaryContent:
        assert b"\0" in data
        return
    assert document.encode() == data


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("aä".encode(), "utf-8"),
        (codecs.BOM_UTF8 + "ä".encode(), "utf-8"),
        (codecs.BOM_UTF16_LE + "ä".encode("utf-16-le"), "utf-16-le"),
        (codecs.BOM_UTF16_BE + "ä".encode("utf-16-be"), "utf-16-be"),
        (codecs.BOM_UTF32_LE + "ä".encode("utf-32-le"), "utf-32-le"),
        (codecs.BOM_UTF32_BE + "ä".encode("utf-32-be"), "utf-32-be"),
        ("aä".encode("latin-1"), "latin-1"),
    ],
)
def test_encodings_are_told_apart(data: bytes, encoding: str) -> None:
    document = decode(data)
    assert document.encoding == encoding
    assert document.text in ("aä", "ä")


def test_a_character_that_the_encoding_has_not_is_refused() -> None:
    with pytest.raises(EditRefused, match="encoded as latin-1, which has no '😀'"):
        Document("a😀", "latin-1").encode()


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("a\r\nb\r\nc", "a\nb", "x\ny", "x\r\ny\r\nc"),  # the file's line ends
        ("a\nb\r\nc\n", "a\n", "x\ny\n", "x\ny\nb\r\nc\n"),  # mixed: those of the place
        ("a\nb\r\nc\n", "b", "x\ny", "a\nx\r\ny\r\nc\n"),
        ("a\r\nb\n", "a\r\n", "a\n", "a\nb\n"),  # an explicit CR is taken as it is
        ("one\ntwo", "two", "", "one\n"),
        ("ab", "b", "c", "ac"),
        ("\ufeffx", "\ufeffx", "y", "y"),
        ("a.b a+b", "a.b", "x", "x a+b"),  # no pattern
    ],
)
def test_replacements(text: str, old: str, new: str, expected: str) -> None:
    assert replace_once(text, old, new).text == expected


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        ("a\nb\na\n", "a", "x", "occurs 2 times, in lines 1, 3"),
        ("aaa", "aa", "x", "occurs 2 times, in lines 1, 1"),  # overlapping
        ("a\n" * 60, "a", "x", "occurs 50 times and more"),
        ("a", "", "x", "old_str is empty"),
        ("a", "a", "a", "new_str is what stands there already"),
        ("\tif x:\n\t\ty\n", "if x:\n    y", "", "from line 1 on but for whitespace"),
        ("a  \nb\n", "z\na\nb", "", "No line is like it"),
        ("foo(a,\n    b)\n", "foo(a, b)", "", "from line 1 on but for whitespace"),
        ("a\nb\n", "     1\ta\n     2\tb", "", "It holds the line numbers of view"),
        ("def first():\n    pass\n", "def frist():", "", "most like it is:\n     1\tdef first():"),
        ("", "x", "y", "No line is like it"),
    ],
)
def test_replacements_that_are_refused(text: str, old: str, new: str, words: str) -> None:
    with pytest.raises(EditRefused) as caught:
        replace_once(text, old, new)
    assert words in str(caught.value)
    assert "nothing was changed" in str(caught.value) or not old


@pytest.mark.parametrize(
    ("text", "line", "new", "edit"),
    [
        ("a\nb\n", 0, "x", Edit("x\na\nb\n", 1, 1)),
        ("a\nb\n", 1, "x\ny\n", Edit("a\nx\ny\nb\n", 2, 3)),
        ("a\nb\n", 2, "x", Edit("a\nb\nx\n", 3, 3)),
        ("a\nb", 2, "x", Edit("a\nb\nx", 3, 3)),
        ("a\nb", 1, "x", Edit("a\nx\nb", 2, 2)),
        ("a\r\nb\r\n", 1, "x\ny", Edit("a\r\nx\r\ny\r\nb\r\n", 2, 3)),
        ("a\r\nb\n", 2, "x", Edit("a\r\nb\nx\n", 3, 3)),
        ("a\r\nb\n", 0, "x", Edit("x\r\na\r\nb\n", 1, 1)),
        ("a\r\nb", 2, "x", Edit("a\r\nb\r\nx", 3, 3)),
        ("", 0, "x", Edit("x\n", 1, 1)),
        ("a\n", 1, "", Edit("a\n\n", 2, 2)),
    ],
)
def test_insertions(text: str, line: int, new: str, edit: Edit) -> None:
    assert insert_after(text, line, new) == edit


@given(PLAIN, PLAIN)
def test_a_snippet_shows_the_change_and_little_else(text: str, new: str) -> None:
    edit = insert_after(text, count_lines(text) // 2, new)
    shown = snippet(edit)
    numbers = [int(line.split("\t")[0]) for line in shown]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[0] >= max(1, edit.first - 4)
    assert edit.first in numbers
    lines = split_lines(edit.text)
    assert [line.split("\t", 1)[1] for line in shown] == [
        lines[number - 1].removesuffix("\n") for number in numbers
    ]


def test_lines_are_numbered_without_their_ends_and_long_ones_are_cut() -> None:
    assert number_lines(["a\r\n", "b\rc\n", "x" * 2003], 9) == [
        "     9\ta",
        "    10\tb\rc",
        "    11\t" + "x" * 2000 + " [... 3 characters more]",
    ]


@pytest.mark.parametrize(
    ("text", "ends"), [("", ""), ("a", ""), ("a\n", "lf"), ("a\r\n", "crlf"), ("a\r\n\n", "mixed")]
)
def test_line_ends_are_told_apart(text: str, ends: str) -> None:
    assert line_ends(text) == ends


def test_a_hostile_file_does_not_make_the_nearest_line_expensive() -> None:
    """Lines of the same letters as the wanted one pass every quick test of difflib."""
    line = "ab" * 100
    with pytest.raises(EditRefused, match="nothing was changed"):
        replace_once((line[1:] + "c\n") * 30_000, "ba" * 100 + "d", "x")


def test_history_is_bounded_and_goes_by_file() -> None:
    history = EditHistory(3000)
    history.keep("/a", b"x" * 1000, b"1")
    history.keep("/b", None, b"2")
    history.keep("/a", b"y" * 1000, b"3")
    newest = history.last("/a")
    assert newest is not None
    assert newest.before == b"y" * 1000
    history.forget(newest)
    before = history.last("/a")
    assert before is not None
    assert before.before == b"x" * 1000
    history.keep("/c", b"z" * 2000, b"4")
    assert history.last("/a") is None
    history.keep("/c", b"z" * 4000, b"5")
    assert history.last("/c") is None


def test_undoing_takes_the_newest_of_equal_edits() -> None:
    history = EditHistory(10_000)
    for before, after in ((b"a", b"b"), (b"b", b"a"), (b"a", b"b")):
        history.keep("/f", before, after)
    newest = history.last("/f")
    assert newest is not None
    history.forget(newest)
    left = history.last("/f")
    assert left is not None
    assert left.before == b"b"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'command' is a required property|'path' is a required property"),
        ({"command": "open", "path": "/a"}, "at command"),
        ({"command": "view"}, "'path' is a required property"),
        ({"command": "view", "path": ""}, "at path"),
        ({"command": "view", "path": "/a", "view_range": [1]}, "at view_range"),
        ({"command": "view", "path": "/a", "view_range": ["1", 2]}, "at view_range/0"),
        ({"command": "view", "path": "/a", "mode": 1}, "mode"),
        ({"command": "create", "path": "/a"}, "create also needs file_text"),
        ({"command": "create", "path": "/a", "file_text": None}, "create also needs file_text"),
        ({"command": "str_replace", "path": "/a", "new_str": "x"}, "also needs old_str"),
        ({"command": "insert", "path": "/a"}, "also needs insert_line and new_str"),
        ({"command": "insert", "path": "/a", "insert_line": -1, "new_str": ""}, "at insert_line"),
        ({"command": "view", "path": "/a\0b"}, "path holds a NUL"),
        ({"command": "view", "path": "/a\ud800"}, "path is not valid Unicode"),
        ({"command": "create", "path": "/a", "file_text": "\ud800"}, "file_text is not valid"),
        ({"command": "view", "path": "x/y"}, "not absolute: .* Maybe you meant /app/x/y"),
        ({"command": "view", "path": "../y"}, "not absolute: .* Maybe you meant /y"),
        ({"command": "view", "path": "~/y"}, "it must begin with /.$"),
    ],
)
def test_wrong_arguments_are_refused_before_the_sandbox(
    arguments: dict[str, Any], words: str
) -> None:
    shell: Any = ScriptedShell()
    with pytest.raises(InvalidArguments, match=words):
        EditorTool().call(arguments, ToolContext(shell=shell, timeout_seconds=1))
    assert shell.commands == []


def test_an_editor_without_a_sandbox_is_ours_to_mend() -> None:
    with pytest.raises(ToolUnavailable, match="needs a sandbox"):
        EditorTool().call({"command": "view", "path": "/a"}, ToolContext(timeout_seconds=1))


@pytest.mark.parametrize(
    "settings", [{"output_bytes": 255}, {"max_edit_bytes": 1e6}, {"history": 1}]
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidToolSettings):
        build_tools(["editor"], {"editor": settings})


def test_settings_are_taken() -> None:
    settings = {"output_bytes": 1000, "max_edit_bytes": 2000}
    tool = build_tools(["editor"], {"editor": settings})["editor"]
    assert isinstance(tool, EditorTool)
    assert (tool.output_bytes, tool.max_edit_bytes) == (1000, 2000)
