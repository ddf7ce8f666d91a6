"""Sending webhooks, from the control worker: collect new events, send what is due, try again.

Signed as Standard Webhooks says (https://www.standardwebhooks.com). An event is sent at least once,
and in no promised order: what fails is sent again later, with the same id.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid5

import aiohttp
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.functions import Now
from redis.exceptions import RedisError
from standardwebhooks import Webhook as Signer
from yarl import URL

from rollouts.models import Webhook, WebhookDelivery
from rollouts.services.event_streams import Seen, end_of, read_after, resync
from rollouts.services.events import EventKind, event_store
from rollouts.services.webhook_addresses import AddressRefused, GuardedResolver, check_literal
from rollouts.services.webhooks import positions_key
from rollouts.text import clean_json
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

# Seconds until the next try after the first, second, … that failed: 28 hours in all.
PAUSES = (5, 60, 300, 1800, 7200, 18000, 36000, 36000)
COLLECTED_AT_ONCE = 500
WAITING_LIMIT = 5_000
RECEIVERS_AT_ONCE = 50
PER_RECEIVER = 50
ROUND_SECONDS = 20.0
CLAIM_SECONDS = 120
ANSWER_BYTES = 500
KEPT_DAYS = 7
# A receiver that failed is left alone with its other deliveries for no longer than this.
LONGEST_SHARED_PAUSE = 60

_busy = threading.Lock()


@dataclass(frozen=True, slots=True)
class Letter:
    """One delivery, as it is sent."""

    id: UUID
    webhook_id: UUID
    url: str
    secret: str
    body: bytes
    tries: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a try met: `status` is None when nobody answered, `detail` is empty when it was taken.

    `untried` letters were left for later because the one before them failed.
    """

    letter: Letter
    status: int | None = None
    detail: str = ""
    untried: bool = False
    pause: int = 0


def deliver_webhooks() -> int:
    """Collect what happened and send what is due; return how many were taken.

    One round at a time in a process; it ends within half a minute whatever the receivers do.
    """
    if not _busy.acquire(blocking=False):
        return 0
    try:
        collect()
        letters = claim()
        if not letters:
            return 0
        release_connection()
        answers = asyncio.run(_send_all(letters))
        for answer in answers:
            _note(answer)
        return sum(not (answer.detail or answer.untried) for answer in answers)
    finally:
        _busy.release()


def collect() -> None:
    """Make deliveries of what happened since the last time, where somebody wants it. Idempotent."""
    webhooks = list(Webhook.objects.filter(active=True).order_by("pk"))
    if not webhooks:
        return
    store = event_store()
    try:
        positions: dict[str, str] = store.hgetall(positions_key())
        for webhook in webhooks:
            try:
                _collect_one(webhook, positions.get(str(webhook.pk)))
            except IntegrityError:
                logger.info("webhook %s was removed meanwhile", webhook.pk)
        known = {str(pk) for pk in Webhook.objects.values_list("pk", flat=True)}
        if forgotten := [each for each in positions if each not in known]:
            store.hdel(positions_key(), *forgotten)
    except RedisError as fault:
        logger.warning("events for webhooks cannot be read: %s", fault)
    past = Now() - timedelta(days=max(KEPT_DAYS, settings.WEBHOOK_GIVE_UP_DAYS + 2))
    WebhookDelivery.objects.filter(next_at__isnull=True, created_at__lt=past).delete()


def _collect_one(webhook: Webhook, position: str | None) -> None:
    """Make deliveries of a webhook's new events; their ids follow from the events' own."""
    waiting = WebhookDelivery.objects.filter(webhook=webhook, next_at__isnull=False)
    if waiting[:WAITING_LIMIT].count() >= WAITING_LIMIT:
        return  # what the stream drops meanwhile becomes one resync
    if position is None:
        seen = [resync(webhook.experiment_id, end_of(webhook.experiment_id))]
    else:
        seen = read_after(webhook.experiment_id, position, limit=COLLECTED_AT_ONCE)
    if not seen:
        return
    rows = [_delivery(webhook, each) for each in seen if _wants(webhook, each.kind)]
    WebhookDelivery.objects.bulk_create(rows, ignore_conflicts=True)
    event_store().hset(positions_key(), str(webhook.pk), seen[-1].id)


def _wants(webhook: Webhook, kind: str) -> bool:
    return not webhook.kinds or kind in webhook.kinds or kind == EventKind.RESYNC


def _delivery(webhook: Webhook, event: Seen) -> WebhookDelivery:
    # A resync has the id of the event that it follows.
    name = f"{event.id} {event.kind == EventKind.RESYNC}"
    return WebhookDelivery(
        id=uuid5(webhook.pk, name),
        webhook=webhook,
        kind=event.kind,
        body=clean_json(json.loads(event.data)),
        next_at=Now(),
    )


def claim() -> list[Letter]:
    """Take what is due, the oldest of each receiver first, for as long as a round may last."""
    due = WebhookDelivery.objects.filter(next_at__lte=Now(), webhook__active=True)
    receivers = list(
        due.order_by("webhook_id")
        .values_list("webhook_id", flat=True)
        .distinct()[:RECEIVERS_AT_ONCE]
    )
    letters: list[Letter] = []
    for webhook_id in receivers:
        with transaction.atomic():
            locked = due.filter(webhook_id=webhook_id).select_for_update(
                skip_locked=True, of=("self",)
            )
            rows = list(locked.select_related("webhook").order_by("created_at")[:PER_RECEIVER])
            WebhookDelivery.objects.filter(pk__in=[row.pk for row in rows]).update(
                next_at=Now() + timedelta(seconds=CLAIM_SECONDS), tries=F("tries") + 1
            )
        letters += [_letter(row) for row in rows]
    return letters


def _letter(row: WebhookDelivery) -> Letter:
    content = {"type": row.kind, "timestamp": row.body.get("at"), "data": row.body}
    return Letter(
        id=row.pk,
        webhook_id=row.webhook_id,
        url=row.webhook.url,
        secret=row.webhook.secret,
        body=json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(),
        tries=row.tries + 1,
    )


async def _send_all(letters: Sequence[Letter]) -> list[Answer]:
    """Send letters, those of a receiver one after the other; return an answer for each."""
    by_receiver: dict[UUID, list[Letter]] = {}
    for letter in letters:
        by_receiver.setdefault(letter.webhook_id, []).append(letter)
    until = time.monotonic() + ROUND_SECONDS
    connector = aiohttp.TCPConnector(resolver=GuardedResolver(), use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=settings.WEBHOOK_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        parts = await asyncio.gather(
            *(_send_to_one(session, part, until) for part in by_receiver.values())
        )
    return [answer for part in parts for answer in part]


async def _send_to_one(
    session: aiohttp.ClientSession, letters: Sequence[Letter], until: float
) -> list[Answer]:
    """Send a receiver's letters until one fails: the rest waits as long as that one."""
    answers: list[Answer] = []
    for letter in letters:
        failed = bool(answers and answers[-1].detail)
        if failed or time.monotonic() > until:
            pause = min(LONGEST_SHARED_PAUSE, _pause(letters[len(answers) - 1])) if failed else 0
            rest = letters[len(answers) :]
            answers += [Answer(each, untried=True, pause=pause) for each in rest]
            break
        answers.append(await _send(session, letter))
    return answers


async def _send(session: aiohttp.ClientSession, letter: Letter) -> Answer:
    now = datetime.now(UTC)
    signature = Signer(letter.secret).sign(str(letter.id), now, letter.body.decode())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "prorl-webhooks/1",
        "webhook-id": str(letter.id),
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signature,
    }
    try:
        url = URL(letter.url)
        check_literal(url.host or "")
        async with session.post(
            url, data=letter.body, headers=headers, allow_redirects=False
        ) as response:
            status = response.status
            if 200 <= status < 300:
                return Answer(letter, status)
            said = await response.content.read(ANSWER_BYTES)
    except TimeoutError:
        return Answer(letter, detail=f"No answer within {settings.WEBHOOK_SECONDS:g} s.")
    except (aiohttp.ClientError, AddressRefused, OSError, ValueError) as fault:
        refused = fault if isinstance(fault, AddressRefused) else fault.__cause__ or fault
        return Answer(letter, detail=f"{type(fault).__name__}: {refused}"[:ANSWER_BYTES])
    text = said.decode(errors="replace").replace("\0", "")
    return Answer(letter, status, f"HTTP {status}. {text}".strip())


def _note(answer: Answer) -> None:
    """Write what a try met, and when the next one is."""
    letter = answer.letter
    row = WebhookDelivery.objects.filter(pk=letter.id)
    if answer.untried:
        row.update(next_at=_later(answer.pause), tries=F("tries") - 1)
    elif not answer.detail:
        row.update(delivered_at=Now(), next_at=None, detail="")
    elif letter.tries > len(PAUSES) or answer.status == 410:
        row.update(next_at=None, detail=f"{answer.detail} Given up after {letter.tries} tries.")
    else:
        row.update(next_at=_later(_pause(letter)), detail=answer.detail)
    if answer.detail:
        _switch_off_if_dead(answer)


def _pause(letter: Letter) -> int:
    """Return the seconds until a letter is tried again, once its present try has failed."""
    return PAUSES[min(letter.tries, len(PAUSES)) - 1]


def _later(seconds: float) -> object:
    return Now() + timedelta(seconds=seconds)


def _switch_off_if_dead(answer: Answer) -> None:
    """Switch a webhook off whose receiver says that it is gone, or took nothing for days."""
    webhook_id = answer.letter.webhook_id
    past = Now() - timedelta(days=settings.WEBHOOK_GIVE_UP_DAYS)
    deliveries = WebhookDelivery.objects.filter(webhook_id=webhook_id)
    why = ""
    if answer.status == 410:
        why = "The receiver answered 410: it is gone."
    elif (
        deliveries.filter(delivered_at__isnull=True, tries__gt=0, created_at__lt=past).exists()
        and not deliveries.filter(delivered_at__gte=past).exists()
    ):
        why = f"Nothing was taken for {settings.WEBHOOK_GIVE_UP_DAYS:g} days."
    if why:
        detail = f"{why} Last: {answer.detail}"
        Webhook.objects.filter(pk=webhook_id, active=True).update(active=False, detail=detail)
        logger.warning("webhook %s is switched off: %s", webhook_id, why)
