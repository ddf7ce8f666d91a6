"""Application of the assembly line."""

from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """Configure the rollouts application."""

    name = "rollouts"

    def ready(self) -> None:
        """Register the system checks and name the plug-ins."""
        from django.conf import settings

        from rollouts import checks  # noqa: F401
        from rollouts.api.reference import checks as surface_checks  # noqa: F401
        from rollouts.filters.registry import FILTERS
        from rollouts.handlers.registry import HANDLERS

        HANDLERS.configure(settings.AGENT_HANDLERS)
        FILTERS.configure(settings.GROUP_FILTERS)
