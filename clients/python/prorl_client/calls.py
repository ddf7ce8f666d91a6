"""One call to the service and its answer, as data; sending them is the transports' work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from uuid import UUID, uuid4

import numpy as np

from prorl_client import arrow
from prorl_client.errors import UnreadableContent
from prorl_client.lines import LineBuffer
from prorl_client.trajectories import Trajectory, read_line

PREFIX = "/api/v1"
NDJSON = "application/x-ndjson"
WAIT_MARGIN_SECONDS = 30.0  # of a long-poll's answer beyond the wait itself
POLL_SECONDS = 45.0  # of one long-poll; the service caps it too


class Sink(Protocol):
    """Where an answer's body goes, chunk by chunk; a new one for every try."""

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""

    def close(self) -> Any:
        """Return what was read, once the body is complete."""


class JsonSink:
    """Read a JSON body; an empty one is None."""

    def __init__(self) -> None:
        self._body = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self._body += chunk

    def close(self) -> Any:
        """Return the value. Raises UnreadableContent."""
        if not self._body:
            return None
        try:
            return json.loads(self._body)
        except ValueError as fault:
            text = bytes(self._body[:80]).decode("utf-8", "replace")
            raise UnreadableContent(
                f"The answer is not JSON but begins {text!r}: is this the service's address?"
            ) from fault


class LinesSink:
    """Read trajectories line by line: the text is never held as a whole."""

    def __init__(self) -> None:
        self._lines = LineBuffer()
        self._found: list[Trajectory] = []

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self._found += [read_line(line) for line in self._lines.feed(chunk) if line.strip()]

    def close(self) -> tuple[None, list[Trajectory]]:
        """Return no description and the trajectories."""
        rest = self._lines.rest()
        if rest.strip():
            self._found.append(read_line(rest))
        return None, self._found


class ArrowSink:
    """Read an Arrow stream into one buffer that the arrays are views of."""

    def __init__(self) -> None:
        self._body = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self._body += chunk

    def close(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """Return the batch's description and the trajectories."""
        return arrow.read_batch(self._body)


class BatchSink:
    """Read a batch in whichever of the formats came."""

    def __init__(self, content_type: str) -> None:
        kind = content_type.partition(";")[0].strip()
        self._sink: Sink
        if kind == arrow.MEDIA_TYPE:
            self._sink = ArrowSink()
        elif kind == NDJSON:
            self._sink = LinesSink()
        else:
            self._sink = JsonSink()

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self._sink.feed(chunk)

    def close(self) -> tuple[dict[str, Any] | None, list[Trajectory]]:
        """Return the description, None where the format has none, and the trajectories."""
        found = self._sink.close()
        if isinstance(found, dict):
            return found, [Trajectory.parse(each) for each in found["trajectories"]]
        return found or (None, [])


@dataclass(frozen=True)
class Call:
    """What to send. The same call may be sent several times: it must mean the same each time.

    The body is `body`, or what the file `file` holds.
    """

    method: str
    path: str
    body: bytes | None = None
    file: Path | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_seconds: float = 0.0
    sink: Callable[[str], Sink] = lambda _content_type: JsonSink()

    @property
    def words(self) -> str:
        """The call as people name it."""
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Answer:
    """What came: the status, the headers, and what the call's sink made of the body."""

    status: int
    headers: Mapping[str, str]
    content: Any


def new_key() -> str:
    """Return an idempotency key: whatever happens, one call with it makes one thing."""
    return uuid4().hex


def call(
    method: str,
    path: str,
    body: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    key: str | None = None,
) -> Call:
    """Return a call with a JSON body."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key is not None:
        headers["Idempotency-Key"] = key
    return Call(
        method=method,
        path=path,
        body=None if body is None else encode(body),
        params={name: each for name, each in (params or {}).items() if each is not None},
        headers=headers,
    )


def batch_call(
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    use_arrow: bool,
    wait_seconds: float = 0.0,
) -> Call:
    """Return a call whose answer is a batch, in the best format that can be read here."""
    plain = call(method, path, body, key=key)
    accept = f"{NDJSON}, application/json;q=0.5"
    if use_arrow:
        accept = f"{arrow.MEDIA_TYPE}, {NDJSON};q=0.8, application/json;q=0.5"
    headers = {**plain.headers, "Accept": accept, "Accept-Encoding": "identity"}
    return Call(
        method=method,
        path=path,
        body=plain.body,
        headers=headers,
        wait_seconds=wait_seconds,
        sink=BatchSink,
    )


def encode(body: Any) -> bytes:
    """Return compact JSON. Raises ValueError for NaN and infinities, TypeError for the rest."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def segment(value: Any) -> str:
    """Return an id or number as one part of a path, whatever is in it."""
    return quote(str(value), safe="")
