"""System checks: deadlines nest, settings are known, Celery keys exist."""

from itertools import pairwise
from typing import Any

from celery.app.defaults import NAMESPACES, flatten
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from evaluators.registry import EVALUATORS
from rollouts.filters.registry import FILTERS
from rollouts.handlers.registry import HANDLERS
from sandboxes.setup_files import VARIABLE_PREFIX

CLIENT_VARIABLES = frozenset({"PRORL_URL", "PRORL_TOKEN", "PRORL_CONFIG", "PRORL_PROFILE"})


@register()
def check_deadlines(**_: Any) -> list[CheckMessage]:
    """Refuse deadlines that do not nest: tool call < stage < stage + grace < Celery's limit."""
    errors: list[CheckMessage] = []
    order = [
        ("PRORL_TOOL_CALL_LIMIT_SECONDS", settings.TOOL_CALL_LIMIT_SECONDS),
        ("PRORL_STAGE_LIMIT_SECONDS", settings.STAGE_LIMIT_SECONDS),
        (
            "PRORL_STAGE_LIMIT_SECONDS + PRORL_STAGE_GRACE_SECONDS",
            settings.STAGE_LIMIT_SECONDS + settings.STAGE_GRACE_SECONDS,
        ),
        ("PRORL_HARD_LIMIT_SECONDS", settings.CELERY_TASK_TIME_LIMIT),
    ]
    for (inner, low), (outer, high) in pairwise(order):
        if not low < high:
            errors.append(
                Error(
                    f"{inner} ({low:g} s) must be below {outer} ({high:g} s).",
                    hint="Deadlines nest, so that the inner one always acts first.",
                    id="rollouts.E001",
                )
            )
    if not settings.HEARTBEAT_SECONDS * 3 <= settings.LEASE_SECONDS:
        errors.append(
            Error(
                f"PRORL_HEARTBEAT_SECONDS ({settings.HEARTBEAT_SECONDS:g} s) must be at most a "
                f"third of PRORL_LEASE_SECONDS ({settings.LEASE_SECONDS:g} s).",
                hint="A worker stops by itself at two thirds of its lease.",
                id="rollouts.E002",
            )
        )
    return errors


@register()
def check_accounts(**_: Any) -> list[CheckMessage]:
    """Refuse MCP servers as the sandboxes' account: a flaw of one would reach every rollout."""
    if not settings.MCP_SERVERS or settings.MCP_ACCOUNT != settings.SANDBOX_ACCOUNT:
        return []
    return [
        Error(
            f"PRORL_MCP_ACCOUNT is {settings.MCP_ACCOUNT}, the account of the sandboxes.",
            hint="It owns every instance and layer of the node: name another one.",
            id="rollouts.E006",
        )
    ]


@register()
def check_setting_names(**_: Any) -> list[CheckMessage]:
    """Refuse PRORL_ variables that no setting reads: a typo would be silent.

    What the trainers' client reads may stand beside them.
    """
    return [
        Error(
            f"Unknown setting {name} in the environment or var/stack.env.",
            hint="See the README's settings table for the names.",
            id="rollouts.E003",
        )
        for name in settings.ENV.unknown("PRORL_")
        if name not in CLIENT_VARIABLES and not name.startswith(VARIABLE_PREFIX)
    ]


@register()
def check_celery_keys(**_: Any) -> list[CheckMessage]:
    """Refuse CELERY_ settings that Celery would silently ignore."""
    known = {f"CELERY_{found[0].upper()}" for found in flatten(NAMESPACES)}
    return [
        Error(
            f"Celery has no setting {name}.",
            hint="Celery ignores unknown keys silently; correct or remove it.",
            id="rollouts.E004",
        )
        for name in dir(settings)
        if name.startswith("CELERY_") and name not in known
    ]


@register()
def check_agent_handlers(**_: Any) -> list[CheckMessage]:
    """Tell which agents were left out; the others work."""
    return [
        Warning(
            f"An agent handler was left out: {fault}",
            hint="See docs/agents.md; environments that name it cannot run.",
            id="rollouts.W005",
        )
        for fault in HANDLERS.faults
    ]


@register()
def check_group_filters(**_: Any) -> list[CheckMessage]:
    """Tell which filters were left out; the others work."""
    return [
        Warning(
            f"A group filter was left out: {fault}",
            hint="See docs/selection.md; groups of experiments that name it are not asked about.",
            id="rollouts.W008",
        )
        for fault in FILTERS.faults
    ]


@register()
def check_evaluators(**_: Any) -> list[CheckMessage]:
    """Tell which evaluators were left out; the others work."""
    return [
        Warning(
            f"An evaluator was left out: {fault}",
            hint="See docs/evaluators.md; environments that name it cannot be scored.",
            id="rollouts.W009",
        )
        for fault in EVALUATORS.faults
    ]


def pool_errors(selected: list[str], pool: str) -> list[str]:
    """Return why a worker with this pool must not serve the selected queues."""
    from rollouts.queues import POOL_OF_QUEUE

    errors = []
    stages = [name for name in POOL_OF_QUEUE if name in selected]
    for name in stages:
        wanted = POOL_OF_QUEUE[name]
        if wanted not in pool and not (wanted == "threads" and pool.endswith("thread")):
            errors.append(
                f"Queue {name!r} needs `--pool {wanted}`, this worker has {pool!r}. "
                f"Start it as: celery -A prorl_site worker -Q {name} --pool {wanted}"
            )
    if len([name for name in stages if name != "control"]) > 1:
        errors.append(
            f"Queues {', '.join(stages)} in one worker: start one worker per stage, "
            f"so that one stage cannot starve another."
        )
    return errors
