"""Policies: create and change."""

from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import F

from rollouts.exceptions import StateConflict
from rollouts.models import Policy, Rollout
from rollouts.services.events import emit_policy_version
from rollouts.services.pacing import publish_feeds
from rollouts.states import OPEN_UPDATE, ExperimentState, ServerState


def create_policy(*, name: str, **values: Any) -> Policy:
    """Create a policy. Raises StateConflict when the name is taken."""
    try:
        with transaction.atomic():
            return Policy.objects.create(name=name, **values)
    except IntegrityError:
        raise _taken(name) from None


def update_policy(*, policy_id: UUID, **changes: Any) -> Policy:
    """Change a policy.

    Raises StateConflict when the new name is taken, when an update is open and the version is to
    change, when a tokenizer comes or goes while servers of the other kind are registered, and
    when model or tokenizer change while rollouts sample from it: their ids are the old one's.
    """
    try:
        with transaction.atomic():
            if changes:
                policy = _check_changes(policy_id, changes)
                if changes.get("version", policy.version) != policy.version:
                    changes["weights_epoch"] = F("weights_epoch") + 1
                    # What servers told until now is of the old weights: the next check asks anew.
                    policy.servers.update(told_version=None)
                    emit_policy_version(policy_id, changes["version"])
                    publish_feeds(policy_id=policy_id)
                Policy.objects.filter(pk=policy_id).update(**changes)
    except IntegrityError:
        raise _taken(str(changes.get("name"))) from None
    return Policy.objects.get(pk=policy_id)


def _check_changes(policy_id: UUID, changes: dict[str, Any]) -> Policy:
    policy = Policy.objects.select_for_update().get(pk=policy_id)
    version = changes.get("version", policy.version)
    if version != policy.version and policy.updates.filter(state__in=OPEN_UPDATE).exists():
        raise StateConflict(
            "An update of the policy is open: complete or abandon it.", code="policy.update_open"
        )
    lowered = version < policy.version
    if lowered and policy.experiments.exclude(state=ExperimentState.STOPPED).exists():
        raise StateConflict(
            f"The policy is at version {policy.version} and experiments sample from it. A trainer "
            "that restarted from an older checkpoint rewinds its experiment: POST "
            "experiments/{id}/rewind/.",
            code="policy.version_not_newer",
        )
    _check_unused(policy, changes)
    turns = "tokenizer" in changes and (not changes["tokenizer"]) != policy.is_text_only
    if turns and policy.servers.exclude(state=ServerState.REMOVED).exists():
        raise StateConflict(
            "Servers are registered that fit the policy as it is, with or without a tokenizer: "
            "remove them first.",
            code="policy.has_servers",
        )
    return policy


def is_used(policy: Policy) -> bool:
    """Tell whether rollouts that have not ended sample from a policy."""
    return Rollout.objects.filter(experiment__policy=policy).unfinished().exists()


def _check_unused(policy: Policy, changes: dict[str, Any]) -> None:
    changed = [
        name
        for name in ("model", "tokenizer")
        if name in changes and changes[name] != getattr(policy, name)
    ]
    if changed and is_used(policy):
        raise StateConflict(
            f"Rollouts sample from this policy, and their token ids are those of its present "
            f"{changed[0]}: wait for their end or stop them, or make another policy.",
            code="policy.in_use",
        )


def _taken(name: str) -> StateConflict:
    return StateConflict(f"There is a policy {name!r} already.", code="policy.exists")
