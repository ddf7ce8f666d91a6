"""What terminal output looks like as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.runtime.screen import printable


def test_printable_drops_escapes_and_replaces_bad_bytes() -> None:
    raw = b"\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07x\x1b(By\x1b]8;;u\x1b\\link\xff\x1b"

    assert printable(raw) == "red\nxylink\ufffd\x1b"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("0%\r50%\r100%\ndone\n", "100%\ndone\n"),
        ("longer text\rshort\n", "shortr text\n"),
        ("longer text\r\x1b[Kshort\n", "short\n"),
        ("longer text\rshort\x1b[0K\n", "short\n"),
        ("longer text\x1b[2K\rshort\n", "short\n"),
        ("50%\r", "50%"),
        ("a\r\r\nb\r\n", "a\nb\n"),
        ("|\b/\b-\b\\\b done\n", " done\n"),
        ("ab\b\b\b\bX\n", "Xb\n"),
        ("日本\rx\n", "x 本\n"),
        ("日本\rxyz\n", "xyz \n"),
        ("abcd\r日\n", "日cd\n"),
        ("日本\b\b国\n", "日国\n"),
        ("日本\bx\n", "日 x\n"),
        ("e\u0301a\rx\n", "xa\n"),
        ("日\u0301本\rab\n", "ab本\n"),
        ("x\x1b[Ky\n", "xy\n"),
        ("\x1b[?1049h\x1b[2J\x1b[Hfull\x1b[?1049l\n", "full\n"),
    ],
)
def test_a_line_drawn_over_itself_keeps_its_last_state(raw: str, text: str) -> None:
    assert printable(raw.encode()) == text


@given(st.text(alphabet="ab日\u0301\r\b\n\t\x1b[K", max_size=60))
def test_what_was_drawn_holds_no_returns(raw: str) -> None:
    text = printable(raw.encode())

    assert "\r" not in text
    assert "\b" not in text
    assert printable(text.replace("\x1b", "").encode()) == text.replace("\x1b", "")
