"""The marker of a command's end: what only looks like one is output."""

import pytest

from sandboxes.runtime.capture import Capture, new_token


def marker(token: str, code: bytes) -> bytes:
    return b"\x1e%b:%b:/x\x1e%b\x1e" % (token.encode(), code, token.encode())


@pytest.mark.parametrize("code", [b"oops", b"", b"256", b"-1", b"0001", b"9" * 5000])
def test_an_answer_with_a_code_that_is_none_is_output(code: bytes) -> None:
    token = new_token()
    capture = Capture(token, 10_000)

    assert not capture.feed(b"before" + marker(token, code))
    assert (capture.code, capture.cwd) == (None, "")
    assert capture.feed(b"after" + marker(token, b"7"))

    assert (capture.code, capture.cwd) == (7, "/x")
    text, truncated = capture.text()
    assert text.startswith("before")
    assert f"{token}:{code.decode()}:/x" in text
    assert text.endswith("after")
    assert not truncated


@pytest.mark.parametrize("code", [0, 1, 99, 128, 255])
def test_each_code_of_a_program_is_found(code: int) -> None:
    token = new_token()
    capture = Capture(token, 1000)

    assert capture.feed(b"out" + marker(token, b"%d" % code))

    assert (capture.code, capture.text()) == (code, ("out", False))
