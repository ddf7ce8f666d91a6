"""The rows of sandboxes: reserve, start, ready, freeze, give up, gone."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.utils import timezone

from sandboxes.models import Node, Sandbox
from sandboxes.states import SandboxPurpose, SandboxState


def reserve_sandbox(*, owner: UUID, node: Node, purpose: str) -> Sandbox:
    """Take a slot of a node for an owner."""
    return Sandbox.objects.create(owner=owner, node=node, purpose=purpose)


def find_sandbox(*, owner: UUID, purpose: str) -> Sandbox | None:
    """Return the owner's usable sandbox for a purpose."""
    return Sandbox.objects.usable().of(owner).filter(purpose=purpose).first()


def mark_starting(*, sandbox_id: UUID) -> bool:
    """Say that the instance is about to be started; False when it was given up meanwhile."""
    return bool(
        Sandbox.objects.filter(
            pk=sandbox_id,
            state__in=[SandboxState.RESERVED, SandboxState.STARTING, SandboxState.READY],
        ).update(state=SandboxState.STARTING)
    )


def mark_ready(*, sandbox_id: UUID, handle: dict[str, Any], layers: Sequence[str] = ()) -> bool:
    """Say that the instance runs on these layers; False when it was given up meanwhile."""
    return bool(
        Sandbox.objects.filter(pk=sandbox_id, state=SandboxState.STARTING).update(
            state=SandboxState.READY,
            handle=handle,
            layers=list(layers),
            ready_at=timezone.now(),
        )
    )


def mark_frozen(*, sandbox_id: UUID, layer: str) -> bool:
    """Say that the instance ended and left a read-only layer."""
    return bool(
        Sandbox.objects.filter(
            pk=sandbox_id, state__in=[SandboxState.READY, SandboxState.FROZEN]
        ).update(state=SandboxState.FROZEN, frozen_layer=layer)
    )


def mark_gone(*, sandbox_id: UUID) -> bool:
    """Say that nothing is left of a sandbox: its slot is free."""
    return bool(
        Sandbox.objects.present()
        .filter(pk=sandbox_id)
        .update(state=SandboxState.GONE, gone_at=timezone.now())
    )


def give_up_sandboxes(*, owner: UUID, purpose: str | None = None) -> list[str]:
    """Mark an owner's sandboxes for removal; return the names of the nodes that must sweep."""
    wanted = Sandbox.objects.usable().of(owner)
    if purpose is not None:
        wanted = wanted.filter(purpose=SandboxPurpose(purpose))
    nodes = sorted(set(wanted.values_list("node__name", flat=True)))
    wanted.update(state=SandboxState.STOPPING)
    return nodes
