"""Admin pages of the assembly line; the operator's view of everything."""

from django.contrib import admin

from rollouts.admin import (
    batches,
    environments,
    evaluations,
    experiments,
    feed,
    policies,
    rollouts,
    snapshots,
    task_imports,
    tasks,
    tokens,
    trajectories,
    verifications,
    webhooks,
    workers,
)
from sandboxes.admin.sandboxes import SandboxAdmin

__all__ = [
    "batches",
    "environments",
    "evaluations",
    "experiments",
    "feed",
    "policies",
    "rollouts",
    "snapshots",
    "task_imports",
    "tasks",
    "tokens",
    "trajectories",
    "verifications",
    "webhooks",
    "workers",
]

SandboxAdmin.owner_page = "admin:rollouts_rollout_change"
admin.site.site_url = None  # the address without a path leads here
admin.site.site_header = "Rollout service"
admin.site.site_title = "Rollout service"
admin.site.index_title = "Operation"
