"""Draining nodes: empty them and take them back into use."""

from uuid import UUID

from sandboxes.models import Node


def set_draining(*, node_id: UUID, draining: bool) -> bool:
    """Start nothing new on a node, or start again; False when it was so already."""
    return bool(
        Node.objects.filter(pk=node_id).exclude(draining=draining).update(draining=draining)
    )
