"""Application of the assembly line."""

from django.apps import AppConfig


class RolloutsConfig(AppConfig):
    """Configure the rollouts application."""

    name = "rollouts"

    def ready(self) -> None:
        """Register the system checks and name the plug-ins."""
        from django.conf import settings

        from evaluators.registry import EVALUATORS
        from evaluators.surroundings import configure_children
        from rollouts import checks  # noqa: F401
        from rollouts.api.reference import checks as surface_checks  # noqa: F401
        from rollouts.filters.registry import FILTERS
        from rollouts.handlers.registry import HANDLERS

        HANDLERS.configure(settings.AGENT_HANDLERS)
        FILTERS.configure(settings.GROUP_FILTERS)
        EVALUATORS.configure(settings.EVALUATORS)
        configure_children(
            judge_hosts=settings.JUDGE_HOSTS,
            judge_cache=settings.JUDGE_CACHE,
            judge_cache_bytes=settings.JUDGE_CACHE_BYTES,
        )
