"""Updates that nobody completes: they time out to a defined state, and an alarm says so."""

import logging
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Prefetch
from django.db.models.functions import Coalesce, Now
from django.utils import timezone

from rollouts.exceptions import StateConflict
from rollouts.models import Policy, PolicyUpdate
from rollouts.services.policy_updates import abandon_update
from rollouts.states import HOLDS_CALLS, OPEN_UPDATE, UpdateState

logger = logging.getLogger(__name__)

TIMED_OUT = "Timed out:"


def abandon_overdue_updates() -> int:
    """Abandon every update that takes longer than the operator allows; return how many.

    Time runs from its beginning until it is ready, and anew from then until it is completed, by
    the database's clock.
    """
    limit = settings.POLICY_UPDATE_LIMIT_SECONDS
    since = Coalesce("ready_at", "created_at")
    overdue = PolicyUpdate.objects.open().annotate(since=since)
    count = 0
    for update in overdue.filter(since__lt=Now() - timedelta(seconds=limit)):
        why = (
            f"{TIMED_OUT} it was {update.state} for {limit:g} s "
            "(PRORL_POLICY_UPDATE_LIMIT_SECONDS). The policy stays at version "
            f"{update.from_version}; make sure that its servers serve that one."
        )
        try:
            abandon_update(policy_id=update.policy_id, number=update.number, why=why)
        except StateConflict:  # completed in this moment
            continue
        logger.error("update %s of policy %s: %s", update.number, update.policy_id, why)
        count += 1
    return count


def alarm_of(update: PolicyUpdate) -> str:
    """Say what is wrong with an update; '' when nothing is.

    One that is open says so once half of its time is over.
    """
    if update.state == UpdateState.ABANDONED and update.detail.startswith(TIMED_OUT):
        return f"Update {update.number} to version {update.to_version}: {update.detail}"
    if update.state not in OPEN_UPDATE:
        return ""
    limit = settings.POLICY_UPDATE_LIMIT_SECONDS
    seconds = (timezone.now() - (update.ready_at or update.created_at)).total_seconds()
    if seconds < limit / 2:
        return ""
    held = " and holds back generation" if update.mode in HOLDS_CALLS else ""
    return (
        f"Update {update.number} to version {update.to_version} has been {update.state} for "
        f"{seconds:.0f} s{held}: it is abandoned after {limit:g} s."
    )


def alarm_of_policy(policy: Policy) -> str:
    """Say what is wrong with a policy's last update; no query where `last_updates` was read."""
    found: list[PolicyUpdate] | None = getattr(policy, "newest_updates", None)
    if found is None:
        found = list(policy.updates.order_by("-number")[:1])
    return alarm_of(found[0]) if found else ""


def last_updates() -> "Prefetch[Any, Any, Any]":
    """Return how to read each policy's last update along with it."""
    newest = PolicyUpdate.objects.order_by("policy_id", "-number").distinct("policy_id")
    return Prefetch("updates", queryset=newest, to_attr="newest_updates")
