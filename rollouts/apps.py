"""Application of the assembly line."""

from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """Configure the rollouts application."""

    name = "rollouts"

    def ready(self) -> None:
        """Register the system checks."""
        from rollouts import checks  # noqa: F401
