"""Pausing a policy's servers for an update, so that none stays paused, whatever happens meanwhile.

What may be paused is written down before the server is asked, and crossed out once the server is
known to go on. A request to pause that nobody saw the answer of may still arrive: such a server is
resumed again until that cannot be any more.
"""

import logging
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from rollouts.models import InferenceServer, PolicyUpdate
from rollouts.services.server_control import CONTROL_SECONDS, pause_servers, resume_servers
from rollouts.states import OPEN_UPDATE, UpdateMode, UpdateState

logger = logging.getLogger(__name__)

CANNOT_PAUSE = "Cannot pause"
CANNOT_RESUME = "Cannot resume"
GAVE_UP = "Gave up resuming"
# When the answer to a request to pause can come no more.
ASK_ENDS_SECONDS = 2 * CONTROL_SECONDS
# A server that cannot be resumed for so long after the update's end is gone for good.
GIVE_UP_SECONDS = 900.0


def pause(update: PolicyUpdate) -> None:
    """Pause every registered server of the policy, and note when all are paused."""
    asked = _write_down(update.pk)
    if not asked:
        if asked is not None:
            _note_paused(update.pk)
        return
    servers = list(InferenceServer.objects.filter(pk__in=asked).select_related("policy"))
    failed = pause_servers(servers, abort=update.mode == UpdateMode.ABORT)
    with transaction.atomic():
        locked = PolicyUpdate.objects.select_for_update().get(pk=update.pk)
        for each in locked.pauses:
            if each["server"] in asked and each["server"] not in failed:
                each["answered"] = True
        locked.save(update_fields=["pauses"])
    if failed:
        PolicyUpdate.objects.open().filter(pk=update.pk).update(
            detail=f"{CANNOT_PAUSE} {'; '.join(failed.values())}"
        )
        return
    _note_paused(update.pk)


def resume(update: PolicyUpdate) -> bool:
    """Resume what an ended update paused; tell whether nothing is left to resume.

    What is left goes to a following update that is ready or pauses servers itself: its trainer
    changes weights on paused servers, and its end resumes them.
    """
    if not update.pauses:
        return True
    if _hand_on(update):
        return True
    ids = [each["server"] for each in update.pauses]
    servers = list(InferenceServer.objects.filter(pk__in=ids).select_related("policy"))
    began = timezone.now()
    failed = resume_servers(servers)
    with transaction.atomic():
        locked = PolicyUpdate.objects.select_for_update().get(pk=update.pk)
        locked.pauses = [
            each
            for each in locked.pauses
            if each["server"] not in ids or each["server"] in failed or _may_arrive(each, began)
        ]
        locked.detail = _what_failed(locked, failed)
        if failed and _is_given_up(locked):
            logger.error("update %s: %s", update.pk, locked.detail)
            locked.pauses = []
        locked.save(update_fields=["pauses", "detail"])
    return not locked.pauses


def _write_down(update_id: UUID) -> list[str] | None:
    """Note that the servers' pause is asked; return their ids, None when the update is over."""
    with transaction.atomic():
        update = PolicyUpdate.objects.select_for_update().get(pk=update_id)
        if update.state not in OPEN_UPDATE:
            return None
        rows = InferenceServer.objects.registered().filter(policy_id=update.policy_id)
        asked = {str(row.pk): row.url for row in rows}
        now = timezone.now().isoformat()
        update.pauses = [each for each in update.pauses if each["server"] not in asked] + [
            {"server": server, "url": url, "asked_at": now, "answered": False}
            for server, url in asked.items()
        ]
        update.save(update_fields=["pauses"])
    return list(asked)


def _note_paused(update_id: UUID) -> None:
    PolicyUpdate.objects.open().filter(pk=update_id, paused_at__isnull=True).update(
        paused_at=timezone.now()
    )


def _hand_on(update: PolicyUpdate) -> bool:
    with transaction.atomic():
        # In the order of their numbers, as everybody who locks two of them does.
        ours = PolicyUpdate.objects.select_for_update().get(pk=update.pk)
        follower = (
            PolicyUpdate.objects.open().select_for_update().filter(policy=update.policy_id).first()
        )
        if follower is None or not (follower.state == UpdateState.READY or follower.pauses):
            return False
        known = {each["server"] for each in follower.pauses}
        follower.pauses += [each for each in ours.pauses if each["server"] not in known]
        ours.pauses = []
        if ours.detail.startswith(CANNOT_RESUME):
            ours.detail = f"Update {follower.number} resumes what this one paused."
        follower.save(update_fields=["pauses"])
        ours.save(update_fields=["pauses", "detail"])
    return True


def _may_arrive(pause: dict[str, Any], now: datetime) -> bool:
    """Tell whether a request to pause, whose answer nobody saw, may still take effect."""
    asked_at = datetime.fromisoformat(pause["asked_at"])
    return not pause["answered"] and now - asked_at < timedelta(seconds=ASK_ENDS_SECONDS)


def _is_given_up(update: PolicyUpdate) -> bool:
    assert update.ended_at is not None
    return timezone.now() - update.ended_at > timedelta(seconds=GIVE_UP_SECONDS)


def _what_failed(update: PolicyUpdate, failed: dict[str, str]) -> str:
    if failed:
        verb = GAVE_UP if _is_given_up(update) else CANNOT_RESUME
        return f"{verb} {'; '.join(failed.values())}"
    return "" if update.detail.startswith(CANNOT_RESUME) else update.detail
