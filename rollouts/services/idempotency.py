"""Idempotency keys: the first call does the work, every later one gets the same answer.

The answer is written in the transaction of the work itself: a call that dies leaves neither, and
its key can be taken over. The time of the claim is the fencing token of that transaction.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from rollouts.exceptions import RolloutError
from rollouts.models import IdempotencyRecord

TAKEOVER_SECONDS = 60.0
KEPT = timedelta(hours=24)
MAX_KEY_LENGTH = IdempotencyRecord._meta.get_field("key").max_length or 0


class IdempotencyConflict(RolloutError):
    """The key was used for another request."""

    code = "idempotency.conflict"
    status = 422


class IdempotencyRunning(RolloutError):
    """The first call with this key has not answered yet, or lost its claim to another."""

    code = "idempotency.running"
    status = 409


@dataclass(frozen=True)
class ClaimedCall:
    """The right to carry out the call of a key, until another takes it over."""

    record_id: int
    claimed_at: datetime


@dataclass(frozen=True)
class RememberedAnswer:
    """What the first call answered."""

    status: int
    body: Any


def fingerprint(body: Any) -> str:
    """Return the SHA-256 of a parsed JSON body, whatever its white space and key order."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def begin_call(*, owner: Any, key: str, route: str, body: Any) -> ClaimedCall | RememberedAnswer:
    """Claim a key, or return what its first call answered.

    Raises IdempotencyConflict for another body, IdempotencyRunning while the first call runs. A
    claim older than TAKEOVER_SECONDS is taken over; answers are kept for 24 hours.
    """
    now = timezone.now()
    mark = fingerprint(body)
    same = IdempotencyRecord.objects.filter(owner=owner, key=key, route=route)
    same.filter(created_at__lte=now - KEPT).delete()
    record, created = IdempotencyRecord.objects.get_or_create(
        owner=owner, key=key, route=route, defaults={"fingerprint": mark}
    )
    if record.fingerprint != mark:
        raise IdempotencyConflict(
            "This Idempotency-Key was sent before with another body; use a new key."
        )
    if created:
        return ClaimedCall(record.pk, record.created_at)
    if record.status is not None:
        return RememberedAnswer(record.status, record.body)
    stale = now - timedelta(seconds=TAKEOVER_SECONDS)
    won = same.filter(
        pk=record.pk, status__isnull=True, created_at=record.created_at, created_at__lte=stale
    ).update(created_at=now)
    if not won:
        raise _running()
    return ClaimedCall(record.pk, now)


def remember_answer(*, call: ClaimedCall, status: int, body: Any) -> None:
    """Write the answer; call inside the transaction of the work.

    Raises IdempotencyRunning when another call took over: the transaction must not commit.
    """
    won = _held(call).update(status=status, body=body)
    if not won:
        raise _running()


def abandon_call(*, call: ClaimedCall) -> None:
    """Forget a claim whose call made nothing: the key is free again."""
    _held(call).delete()


def forget_old_calls(*, now: datetime) -> int:
    """Delete the records that are kept no longer; return how many."""
    count, _by_model = IdempotencyRecord.objects.filter(created_at__lte=now - KEPT).delete()
    return count


def _held(call: ClaimedCall) -> Any:
    return IdempotencyRecord.objects.filter(
        pk=call.record_id, created_at=call.claimed_at, status__isnull=True
    )


def _running() -> IdempotencyRunning:
    return IdempotencyRunning(
        "The first call with this Idempotency-Key is still running; ask again.", retry_after=1.0
    )
