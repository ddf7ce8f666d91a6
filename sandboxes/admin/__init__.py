"""Admin pages of images, nodes and sandboxes."""

from sandboxes.admin import images, nodes, sandboxes

__all__ = ["images", "nodes", "sandboxes"]
