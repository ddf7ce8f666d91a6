"""Asking for the state of a rollout's sandbox, and deleting it."""

from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import transaction

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import Group, JournalEntry, Rollout
from rollouts.services.attempts import lock_rollout
from rollouts.states import GroupState, RolloutState
from sandboxes.models import Snapshot
from sandboxes.services.snapshots import request_snapshot

_AHEAD = (RolloutState.QUEUED, RolloutState.INIT, RolloutState.RUN)


def ask_for_snapshot(*, rollout: Rollout, turn: int | None = None) -> Snapshot:
    """Ask for the sandbox's state after `turn` turns, or after the next one.

    Raises StateConflict when that turn is over, InvalidValue.
    """
    with transaction.atomic():
        # Under the lock that ends an episode: what is asked for is taken, or failed at its end.
        lock_rollout(rollout_id=rollout.pk)
        state = Rollout.objects.values_list("state", flat=True).get(pk=rollout.pk)
        return _ask(rollout, state, turn)


def _ask(rollout: Rollout, state: str, turn: int | None) -> Snapshot:
    if not rollout.needs_sandbox:
        raise StateConflict("The rollout has no sandbox.", code="snapshot.no_sandbox")
    if state not in _AHEAD:
        raise StateConflict("The episode is over.", code="snapshot.too_late")
    if turn is not None:
        done = JournalEntry.objects.filter(rollout=rollout, kind="observed", turn__gte=turn - 1)
        if done.exists():
            raise StateConflict(f"Turn {turn} is done already.", code="snapshot.too_late")
    try:
        return request_snapshot(owner=rollout.pk, environment=rollout.environment, turn=turn)
    except ValidationError as fault:
        raise InvalidValue(" ".join(fault.messages)) from None


def delete_snapshot(*, snapshot_id: UUID) -> bool:
    """Delete a snapshot; False while an unfinished group starts from it. Idempotent.

    Finished groups forget it; its layer goes with the node's next sweep.
    """
    with transaction.atomic():
        # The same lock as a submit takes: no group comes between the question and the deletion.
        locked = Snapshot.objects.select_for_update().filter(pk=snapshot_id).first()
        if locked is None:
            return True
        if Group.objects.filter(snapshot=locked, state=GroupState.OPEN).exists():
            return False
        locked.delete()
    return True
