"""Application of images, environments, nodes and sandboxes."""

from django.apps import AppConfig


class SandboxesConfig(AppConfig):
    """Configure the sandboxes application."""

    name = "sandboxes"

    def ready(self) -> None:
        """Register the system checks."""
        from sandboxes import checks  # noqa: F401
