"""What can go wrong: each error says what happened and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prorl_client.advice import advice_for

LEASE_ENDED = ("batch.expired", "batch.returned", "batch.rewound")


class ProrlError(Exception):
    """Anything that this package raises on purpose."""


class ConfigError(ProrlError):
    """The client was not told enough, or not safely: address, token or configuration file."""


class ServiceUnreachable(ProrlError):
    """No answer came, however often it was tried; the last fault is the cause."""


class WaitTimedOut(ProrlError, TimeoutError):
    """What was waited for did not come in time; waiting again goes on where this one ended."""


class NothingLeft(ProrlError):
    """No batch can come any more: the experiment is stopped, or its feed is used up."""


class MissingExtra(ProrlError, ImportError):
    """Something needs an optional package that is not installed."""


class UnreadableContent(ProrlError):
    """The service sent something that this client cannot read."""


class ProblemError(ProrlError):
    """The service refused a call: `code` is stable, `detail` and `advice` are for people."""

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        call: str = "",
        request_id: str | None = None,
        errors: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.detail = detail
        self.advice = advice_for(code, status)
        self.call = call
        self.request_id = request_id
        self.errors = dict(errors or {})
        self.retry_after = retry_after
        self.members = dict(members or {})
        super().__init__(self._message())

    def _message(self) -> str:
        faults = "".join(f"\n  {place}: {what}" for place, what in flat_errors(self.errors))
        advice = f" {self.advice}" if self.advice else ""
        tail = f" [{self.call}; request {self.request_id}]" if self.call else ""
        return f"{self.code} ({self.status}): {self.detail}{faults}{advice}{tail}"


class AuthError(ProblemError):
    """The token is missing, wrong, expired or revoked, or may not do this."""


class NotFound(ProblemError):
    """There is no such thing, or it is not the caller's."""


class InvalidRequest(ProblemError):
    """The request itself is wrong; sending it again does not help."""


class Conflict(ProblemError):
    """The thing is in a state in which the call has no meaning."""


class LeaseExpired(Conflict):
    """The batch is no longer this trainer's: its lease ran out, or it was given back or rewound."""


class ServerError(ProblemError):
    """The service failed or is overloaded, and trying again did not help in time."""


def problem_from(
    *, status: int, headers: Mapping[str, str], body: bytes, call: str, request_id: str | None
) -> ProblemError:
    """Return the error for an answer that is none of success; any body will do."""
    members = _members(body)
    code = str(members.get("code") or f"http.{status}")
    text = body[:300].decode("utf-8", "replace").strip()
    detail = str(members.get("detail") or text or "The answer has no text.")
    errors = members.get("errors")
    return _kind(status, code)(
        status=status,
        code=code,
        detail=detail,
        call=call,
        request_id=headers.get("x-request-id") or request_id,
        errors=errors if isinstance(errors, Mapping) else None,
        retry_after=seconds_in(headers.get("retry-after")),
        members=members,
    )


def seconds_in(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header; dates and nonsense are None."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def flat_errors(errors: Any, place: str = "") -> list[tuple[str, str]]:
    """Return faults by field as pairs of dotted place and words."""
    if isinstance(errors, Mapping):
        pairs = ((f"{place}.{key}" if place else str(key), each) for key, each in errors.items())
        return [found for where, each in pairs for found in flat_errors(each, where)]
    if isinstance(errors, list) and any(isinstance(each, Mapping | list) for each in errors):
        named = ((f"{place}[{number}]", each) for number, each in enumerate(errors))
        return [found for where, each in named if each for found in flat_errors(each, where)]
    words = " ".join(map(str, errors)) if isinstance(errors, list) else str(errors)
    return [(place or "request", words)]


def _members(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _kind(status: int, code: str) -> type[ProblemError]:
    if code in LEASE_ENDED or (status == 410 and code.startswith("batch.")):
        return LeaseExpired
    if status in (401, 403):
        return AuthError
    if status == 404:
        return NotFound
    if status in (409, 410):
        return Conflict
    if status == 429 or status >= 500:
        return ServerError
    return InvalidRequest
