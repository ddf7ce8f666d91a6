"""Read server-sent events out of bytes."""

from collections.abc import Iterable, Iterator

from rollouts.inference.exceptions import MalformedAnswer

# The first event of a long prompt repeats its ids: 256,000 of them are about 2 MB.
MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"
PREFIX = b"data: "


class EventReader:
    """Cut a stream into the data of its events; comments and other fields are skipped.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, part: bytes) -> Iterable[bytes]:
        """Return the data of every event that is whole now; raise MalformedAnswer when too large.

        Iterate over it before the next part is fed.
        """
        if not self._rest and not self._data:
            # What servers send nearly always: no line by line.
            *events, rest = part.split(b"\n\n")
            if not rest and b"\r" not in part and all(map(_is_plain, events)):
                return [event[len(PREFIX) :] for event in events]
        return self._feed(part)

    def _feed(self, part: bytes) -> Iterator[bytes]:
        self._rest += part
        if len(self._rest) + self._size > MAX_EVENT_BYTES and b"\n" not in part:
            raise MalformedAnswer(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        if b"\n" not in part:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data, self._size = [], 0
            return event
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._size += len(data)
            if self._size > MAX_EVENT_BYTES:
                raise MalformedAnswer(f"an event is larger than {MAX_EVENT_BYTES} bytes")
            self._data.append(data)
        return None


def _is_plain(event: bytes) -> bool:
    return event.startswith(PREFIX) and b"\n" not in event
