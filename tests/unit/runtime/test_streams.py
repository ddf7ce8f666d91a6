"""Bounded capture keeps head and tail, whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.runtime.streams import HeadTail


@given(st.lists(st.binary(max_size=50)), st.integers(2, 100))
def test_head_and_tail_are_those_of_the_whole(pieces: list[bytes], limit: int) -> None:
    kept = HeadTail(limit)
    for piece in pieces:
        kept.feed(piece)
    whole = b"".join(pieces)

    head, missing, tail = kept.parts()

    assert len(head) + missing + len(tail) == len(whole)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert kept.truncated == (missing > 0) == (len(whole) > limit)
    if missing:
        assert len(head) + len(tail) == limit
    else:
        assert kept.joined() == whole


def test_the_gap_is_said() -> None:
    kept = HeadTail(4)
    kept.feed(b"abcdefgh")

    assert kept.joined() == b"ab\n[... 4 bytes left out ...]\ngh"
