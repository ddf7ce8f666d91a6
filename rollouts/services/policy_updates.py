"""Weight updates of policies: begin, become ready, complete or abandon, let generation go on.

The database is the truth. The gate in the broker's store follows it, and is put right by every
round of `advance_updates`: whatever dies in the middle, the next round finds what is left to do.
"""

import logging
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, F, Max, OuterRef, Q
from django.utils import timezone

from rollouts.exceptions import InvalidValue, NotThere, RolloutError, StateConflict
from rollouts.inference.exceptions import RouterUnavailable
from rollouts.models import (
    Attempt,
    InferenceServer,
    JournalEntry,
    Policy,
    PolicyUpdate,
    Rollout,
)
from rollouts.services import policy_pauses
from rollouts.services.events import emit_policy_version
from rollouts.services.messages import (
    publish_attempt,
    publish_dispatch,
    publish_policy_updates,
)
from rollouts.services.pacing import publish_feeds
from rollouts.services.policy_gate import policy_gate
from rollouts.services.policy_pauses import CANNOT_PAUSE
from rollouts.services.server_control import ServerAnswer, flush_servers, versions
from rollouts.states import (
    HOLDS_CALLS,
    OPEN_UPDATE,
    AttemptState,
    RolloutState,
    Stage,
    UpdateMode,
    UpdateState,
)

logger = logging.getLogger(__name__)


class ControlNotAllowed(RolloutError):
    """The operator does not let the service pause and resume inference servers."""

    code = "policy.control_not_allowed"
    status = 403


def begin_update(
    *, policy_id: UUID, version: int, mode: str, control: bool = False, asked_by: Any = None
) -> PolicyUpdate:
    """Begin an update; from its commit on nothing begins that its mode holds back.

    Locks the policy. Raises NotThere, ControlNotAllowed, InvalidValue for `control` of a mode that
    lets requests run, and StateConflict when an update is open or the version does not rise.
    """
    if control and not settings.POLICY_CONTROL:
        raise ControlNotAllowed(
            "This service does not control inference servers (PRORL_POLICY_CONTROL): pause and "
            "resume them yourself, and begin the update without `control`."
        )
    if control and mode == UpdateMode.NONE:
        raise InvalidValue(
            "The mode 'none' lets requests run while weights are exchanged, and `control` pauses "
            "the servers: use the mode 'abort' or 'drain-calls', or leave `control` out."
        )
    with transaction.atomic():
        policy = Policy.objects.select_for_update().filter(pk=policy_id).first()
        if policy is None:
            raise NotThere("There is no such policy.")
        open_one = policy.updates.filter(state__in=OPEN_UPDATE).first()
        if open_one is not None:
            raise StateConflict(
                f"Update {open_one.number} to version {open_one.to_version} is {open_one.state}: "
                "complete or abandon it first.",
                code="policy.update_open",
            )
        if version <= policy.version:
            raise StateConflict(
                f"The policy is at version {policy.version}; an update leads to a higher one, "
                f"not to {version}. A trainer that restarted from an older checkpoint rewinds its "
                "experiment: POST experiments/{id}/rewind/.",
                code="policy.version_not_newer",
            )
        last = policy.updates.aggregate(last=Max("number"))["last"] or 0
        at_once = mode == UpdateMode.NONE
        update = PolicyUpdate.objects.create(
            policy=policy,
            number=last + 1,
            from_version=policy.version,
            to_version=version,
            mode=mode,
            control=control,
            state=UpdateState.READY if at_once else UpdateState.QUIESCING,
            ready_at=timezone.now() if at_once else None,
            requested_by=asked_by,
        )
        if mode in HOLDS_CALLS:
            transaction.on_commit(partial(_close_gate, update))
        publish_policy_updates()
    return update


def advance_updates() -> int:
    """Bring every update that is not over one step on; return how many there are."""
    updates = list(PolicyUpdate.objects.unreleased().order_by("created_at"))
    for update in updates:
        try:
            if update.state in OPEN_UPDATE:
                if update.control and update.paused_at is None:
                    _pause(update)
                check_ready(update_id=update.pk)
            else:
                release(update_id=update.pk)
        except Exception:
            logger.exception("update %s could not be brought on; the next round tries", update.pk)
    _keep_known()
    return len(updates)


def check_ready(*, update_id: UUID) -> PolicyUpdate:
    """Hold back what the update holds back, and note when all has become quiet; idempotent."""
    update = PolicyUpdate.objects.get(pk=update_id)
    if update.state not in OPEN_UPDATE:
        return update
    waits_for = _waits_for(update)
    if update.state == UpdateState.READY:
        return update
    if waits_for:
        PolicyUpdate.objects.filter(pk=update_id, state=UpdateState.QUIESCING).update(
            detail=waits_for
        )
    else:
        PolicyUpdate.objects.filter(pk=update_id, state=UpdateState.QUIESCING).update(
            state=UpdateState.READY, ready_at=timezone.now(), detail=""
        )
    return PolicyUpdate.objects.get(pk=update_id)


def complete_update(*, policy_id: UUID, number: int) -> PolicyUpdate:
    """Ask every server for its version, raise the policy's, and let generation go on.

    Completing a completed update changes nothing. Raises NotThere, and StateConflict when it is
    not ready or not quiet any more, was abandoned, or a server says another version or cannot be
    asked.
    """
    update = check_ready(update_id=find_update(policy_id=policy_id, number=number).pk)
    if update.state == UpdateState.COMPLETED:
        return update
    if update.state == UpdateState.ABANDONED:
        raise _ended(update)
    if update.state != UpdateState.READY:
        raise StateConflict(
            f"The update is {update.state}: {update.detail or 'wait until it is ready'}",
            code="policy.update_not_ready",
        )
    noise = _waits_for(update)
    if noise:
        raise StateConflict(
            f"The update was ready, but it is not certain that nothing is generated: {noise} "
            "Complete again in a while; what was sampled meanwhile is of no known version.",
            code="policy.update_not_quiet",
        )
    said = versions(policy=update.policy, expected=update.to_version)
    PolicyUpdate.objects.filter(pk=update.pk, state=UpdateState.READY).update(
        servers=[each.as_dict() for each in said]
    )
    wrong = [f"{each.url} {each.said}" for each in said if not each.ok]
    if wrong:
        raise StateConflict(
            f"Not every server serves version {update.to_version}: {'; '.join(wrong)}. Give them "
            "the weights, or remove them, and complete again.",
            code="policy.version_mismatch",
        )
    if update.control:
        flush_servers(policy=update.policy)
    with transaction.atomic():
        Policy.objects.select_for_update().get(pk=policy_id)
        won = _end(update, UpdateState.COMPLETED)
        if won:
            Policy.objects.filter(pk=policy_id).update(
                version=update.to_version, weights_epoch=F("weights_epoch") + 1
            )
            _note_told(said)
            emit_policy_version(policy_id, update.to_version)
            transaction.on_commit(partial(_release_soon, update.pk))
    if not won:  # somebody else ended it meanwhile
        return complete_update(policy_id=policy_id, number=number)
    return PolicyUpdate.objects.get(pk=update.pk)


def abandon_update(*, policy_id: UUID, number: int, why: str = "") -> PolicyUpdate:
    """Go on with the old version. Abandoning twice changes nothing.

    Raises NotThere, and StateConflict when it was completed.
    """
    update = find_update(policy_id=policy_id, number=number)
    with transaction.atomic():
        if _end(update, UpdateState.ABANDONED, detail=why or "Abandoned."):
            # Nobody knows what the servers computed meanwhile: it must not be found again.
            Policy.objects.filter(pk=policy_id).update(weights_epoch=F("weights_epoch") + 1)
            transaction.on_commit(partial(_release_soon, update.pk))
    update = PolicyUpdate.objects.get(pk=update.pk)
    if update.state != UpdateState.ABANDONED:
        raise _ended(update)
    return update


def release(*, update_id: UUID) -> None:
    """Let go on what an ended update held back; idempotent, and done again until it worked."""
    update = PolicyUpdate.objects.select_related("policy").get(pk=update_id)
    if update.state in OPEN_UPDATE or update.released_at is not None:
        return
    resumed = policy_pauses.resume(update)
    policy_gate().open(str(update.policy_id), str(update_id), epoch=update.policy.weights_epoch)
    with transaction.atomic():
        opened = PolicyUpdate.objects.filter(pk=update_id, opened_at__isnull=True)
        if opened.update(opened_at=timezone.now()):
            if update.mode == UpdateMode.DRAIN_ROLLOUTS:
                _publish_held_back(update.policy_id)
            publish_dispatch()
        if resumed:
            PolicyUpdate.objects.filter(pk=update_id, released_at__isnull=True).update(
                released_at=timezone.now()
            )


def find_update(*, policy_id: UUID, number: int) -> PolicyUpdate:
    """Return an update of a policy by its number. Raises NotThere."""
    update = (
        PolicyUpdate.objects.select_related("policy")
        .filter(policy_id=policy_id, number=number)
        .first()
    )
    if update is None:
        raise NotThere("The policy has no such update.")
    return update


def held_seconds(*, policy_id: UUID, since: datetime, until: datetime) -> float:
    """Return for how much of a time updates held back the policy's generation."""
    updates = PolicyUpdate.objects.filter(
        Q(opened_at__isnull=True) | Q(opened_at__gt=since),
        policy_id=policy_id,
        mode__in=HOLDS_CALLS,
        created_at__lt=until,
    )
    return sum(
        (min(opened or until, until) - max(created, since)).total_seconds()
        for created, opened in updates.values_list("created_at", "opened_at")
    )


def is_open(*, update_id: str) -> bool:
    """Tell whether an update is open, read anew; one that does not exist is not."""
    try:
        return PolicyUpdate.objects.open().filter(pk=UUID(update_id)).exists()
    except ValueError:
        return False


def still_running(*, policy_id: UUID) -> tuple[int | None, int]:
    """Return how many generations (None: unknown) and how many rollouts are under way."""
    try:
        calls: int | None = policy_gate().inside(str(policy_id))
    except RouterUnavailable:
        calls = None
    return calls, rollouts_begun(policy_id=policy_id)


def rollouts_begun(*, policy_id: UUID) -> int:
    """Return how many rollouts of a policy have begun RUN and not ended it."""
    running = Attempt.objects.filter(
        rollout=OuterRef("pk"), stage=Stage.RUN, state=AttemptState.RUNNING
    )
    journaled = JournalEntry.objects.filter(rollout=OuterRef("pk"), restarts=OuterRef("restarts"))
    begun = Rollout.objects.filter(
        Exists(running) | Exists(journaled),
        experiment__policy_id=policy_id,
        state=RolloutState.RUN,
    )
    return begun.count()


def _waits_for(update: PolicyUpdate) -> str:
    """Hold back what the mode holds back; return what is not quiet yet, '' when all is."""
    if update.mode in HOLDS_CALLS:
        try:
            inside = policy_gate().close(str(update.policy_id), str(update.pk))
        except RouterUnavailable as fault:
            return str(fault)
        if inside.count:
            return f"{inside.count} generations are under way."
        if not policy_gate().is_empty(inside):
            return "The routing store began anew; what is under way reports itself."
    if update.mode == UpdateMode.DRAIN_ROLLOUTS:
        begun = rollouts_begun(policy_id=update.policy_id)
        if begun:
            return f"{begun} rollouts are running."
    if update.control and update.paused_at is None:
        failed = update.detail.startswith(CANNOT_PAUSE)
        return update.detail if failed else "The servers are being paused."
    return ""


def _close_gate(update: PolicyUpdate) -> None:
    try:
        policy_gate().close(str(update.policy_id), str(update.pk))
    except RouterUnavailable as fault:
        logger.warning("update %s: %s; the next round closes the gate", update.pk, fault)


def _pause(update: PolicyUpdate) -> None:
    """Pause the servers; in drain modes once nothing of ours is under way."""
    if update.mode in (UpdateMode.DRAIN_CALLS, UpdateMode.DRAIN_ROLLOUTS):
        others = PolicyUpdate(pk=update.pk, policy_id=update.policy_id, mode=update.mode)
        if _waits_for(others):
            return
    policy_pauses.pause(update)


def _note_told(said: list[ServerAnswer]) -> None:
    """Write down which versions the servers told: whoever told another gets no requests."""
    for answer in said:
        InferenceServer.objects.filter(pk=answer.server).update(told_version=answer.version)


def _end(update: PolicyUpdate, state: str, *, detail: str = "") -> bool:
    expected = (
        [UpdateState.READY] if state == UpdateState.COMPLETED else list[UpdateState](OPEN_UPDATE)
    )
    won = PolicyUpdate.objects.filter(pk=update.pk, state__in=expected).update(
        state=state, detail=detail, ended_at=timezone.now()
    )
    if won:
        publish_feeds(policy_id=update.policy_id)
    return bool(won)


def _release_soon(update_id: UUID) -> None:
    """Release now; what does not work now is tried by the next round."""
    try:
        release(update_id=update_id)
    except RouterUnavailable as fault:
        logger.warning("update %s: %s; the next round opens the gate", update_id, fault)


def _publish_held_back(policy_id: UUID) -> None:
    """Publish the RUN attempts that workers refused meanwhile."""
    waiting = (
        Attempt.objects.queued()
        .filter(stage=Stage.RUN, rollout__experiment__policy_id=policy_id)
        .select_related("node")
    )
    for attempt in waiting:
        node = attempt.node.name if attempt.node else None
        publish_attempt(attempt_id=attempt.pk, stage=attempt.stage, node=node)


def _keep_known() -> None:
    """Have the store know of every policy's passes before an update asks for them."""
    try:
        for policy_id in Policy.objects.values_list("pk", flat=True):
            policy_gate().know(str(policy_id))
    except RouterUnavailable as fault:
        logger.warning("%s", fault)


def _ended(update: PolicyUpdate) -> StateConflict:
    return StateConflict(f"The update was {update.state}.", code="policy.update_ended")
