"""Webhooks: register an address, change it, remove it, send a delivery again."""

import base64
import logging
import secrets
from functools import partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from redis.exceptions import RedisError

from rollouts.exceptions import InvalidValue, NotThere, StateConflict
from rollouts.models import Experiment, Webhook, WebhookDelivery
from rollouts.services.event_streams import end_of
from rollouts.services.events import EventKind, event_store
from rollouts.services.webhook_addresses import check_url

logger = logging.getLogger(__name__)

MAX_PER_EXPERIMENT = 10
SECRET_BYTES = 32


def positions_key() -> str:
    """Return the name, in the broker's store, of where each webhook stands in its stream."""
    return f"prorl:{settings.DEPLOYMENT}:webhooks"


def create_webhook(*, experiment: Experiment, url: str, kinds: list[str]) -> tuple[Webhook, str]:
    """Register an address for an experiment's events from now on; return it and its secret.

    Raises InvalidValue, and StateConflict when the experiment has as many as it may.
    """
    check_url(url)
    _check_kinds(kinds)
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    with transaction.atomic():
        Experiment.objects.select_for_update(no_key=True).get(pk=experiment.pk)
        if experiment.webhooks.count() >= MAX_PER_EXPERIMENT:
            raise StateConflict(
                f"The experiment has {MAX_PER_EXPERIMENT} webhooks already: remove one.",
                code="webhook.too_many",
            )
        webhook = Webhook.objects.create(
            experiment=experiment, url=url, secret=secret, kinds=sorted(set(kinds))
        )
        transaction.on_commit(partial(_begin_now, webhook), robust=True)
    return webhook, secret


def update_webhook(*, webhook_id: UUID, **changes: Any) -> Webhook:
    """Change address, kinds or whether it is active; activating it forgets why it was not.

    Raises InvalidValue.
    """
    if "url" in changes:
        check_url(changes["url"])
    if "kinds" in changes:
        _check_kinds(changes["kinds"])
        changes["kinds"] = sorted(set(changes["kinds"]))
    if changes.get("active"):
        changes["detail"] = ""
    if changes:
        with transaction.atomic():
            if changes.get("active"):
                # What failed until now is no reason to switch it off again with the next failure.
                failed = WebhookDelivery.objects.filter(
                    webhook_id=webhook_id, delivered_at__isnull=True
                )
                failed.filter(next_at__isnull=True).update(tries=0)
                failed.filter(next_at__isnull=False).update(
                    tries=0, next_at=Now(), created_at=Now()
                )
            Webhook.objects.filter(pk=webhook_id).update(**changes)
    return Webhook.objects.get(pk=webhook_id)


def delete_webhook(*, webhook_id: UUID) -> None:
    """Remove a webhook; nothing more is sent. Idempotent."""
    Webhook.objects.filter(pk=webhook_id).delete()


def redeliver(*, webhook_id: UUID, delivery_id: UUID) -> WebhookDelivery:
    """Send a delivery again, as soon as may be; its receiver sees the same id.

    Raises NotThere, and StateConflict when the webhook is switched off.
    """
    with transaction.atomic():
        webhook = Webhook.objects.select_for_update().get(pk=webhook_id)
        if not webhook.active:
            raise StateConflict(
                "The webhook is switched off: set `active` first.", code="webhook.inactive"
            )
        found = WebhookDelivery.objects.filter(pk=delivery_id, webhook=webhook)
        anew = {"tries": 0, "next_at": Now(), "created_at": Now(), "delivered_at": None}
        if not found.update(detail="", **anew):
            raise NotThere("The webhook has no such delivery.")
        return found.get()


def _check_kinds(kinds: list[str]) -> None:
    unknown = sorted(set(kinds) - set(EventKind))
    if unknown:
        raise InvalidValue(f"Unknown kind {unknown[0]!r}; known: {', '.join(EventKind)}.")


def _begin_now(webhook: Webhook) -> None:
    """Note where the stream ends; a store that is away makes the first delivery a `resync`."""
    try:
        event_store().hset(positions_key(), str(webhook.pk), end_of(webhook.experiment_id))
    except RedisError as fault:
        logger.warning("webhook %s begins with a resync: %s", webhook.pk, fault)
