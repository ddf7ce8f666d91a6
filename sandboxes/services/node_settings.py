"""Nodes: what operators set."""

from typing import Any
from uuid import UUID

from sandboxes.models import Node


def change_node(*, node_id: UUID, **changes: Any) -> None:
    """Set `capacity` or `draining`; it holds for rollouts not yet started."""
    if changes:
        Node.objects.filter(pk=node_id).update(**changes)
