"""Server-sent events, read incrementally (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from prorl_client.lines import LineBuffer
from prorl_client.records import moment

RESYNC = "resync"


@dataclass(frozen=True)
class Event:
    """Something that happened to an experiment.

    Kind `resync`: events before this one were lost; read again what you follow.
    """

    id: str
    kind: str
    at: datetime | None
    experiment: str | None
    values: Mapping[str, Any] = field(default_factory=dict)


class EventParser:
    """Turn chunks of an event stream into events; `last_id` is where to resume."""

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._lines = LineBuffer()
        self._kind = ""
        self._data: list[str] = []
        self._id = last_id

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this chunk completes."""
        found = (self._take(line) for line in self._lines.feed(chunk))
        return [event for event in found if event is not None]

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value[1:] if value.startswith(" ") else value
        if name == "event":
            self._kind = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # a comment, such as a ping, or a field that we do not know

    def _dispatch(self) -> Event | None:
        kind, data = self._kind, "\n".join(self._data)
        self._kind, self._data = "", []
        self.last_id = self._id
        if not kind and not data:
            return None
        values = _object(data)
        return Event(
            id=self._id,
            kind=str(values.pop("kind", None) or kind or "message"),
            at=moment(values.pop("at", None)),
            experiment=values.pop("experiment", None),
            values=values,
        )


def _object(data: str) -> dict[str, Any]:
    try:
        found = json.loads(data) if data else {}
    except ValueError:
        return {"text": data}
    return found if isinstance(found, dict) else {"value": found}
