"""Events are read the same however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.inference.exceptions import MalformedAnswer
from rollouts.inference.streams import MAX_EVENT_BYTES, EventReader

STREAM = (
    b": a comment\n\ndata: one\n\nevent: x\r\nid: 4\r\ndata:two\r\ndata:  lines\r\n\r\n"
    b"data:\n\ndata: [DONE]\n\ndata: never ended"
)
EVENTS = [b"one", b"two\n lines", b"", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(places)]
    assert read_all(parts) == EVENTS


@pytest.mark.parametrize("line", [b"data: " + b"x" * 2**20 + b"\n", b"x" * 2**20])
def test_an_event_without_an_end_is_refused(line: bytes) -> None:
    parts = [line] * 20
    with pytest.raises(MalformedAnswer, match=f"larger than {MAX_EVENT_BYTES} bytes"):
        read_all(parts)


def read_all(parts: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)]
