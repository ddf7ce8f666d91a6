"""Admin pages of the assembly line; the operator's view of everything."""

from django.contrib import admin

from rollouts.admin import (
    batches,
    environments,
    experiments,
    policies,
    rollouts,
    tasks,
    tokens,
    trajectories,
    workers,
)

__all__ = [
    "batches",
    "environments",
    "experiments",
    "policies",
    "rollouts",
    "tasks",
    "tokens",
    "trajectories",
    "workers",
]

admin.site.site_header = "Rollout service"
admin.site.site_title = "Rollout service"
admin.site.index_title = "Operation"
