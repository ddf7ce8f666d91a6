"""By which evaluator, settings and payload a task's rollouts are graded."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rollouts.models import Task
from sandboxes.models import Environment


def grading_settings(
    *, environment: Environment, task: Task
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return evaluator, settings and payload: a task's own settings go before the environment's."""
    hidden = task.hidden
    evaluator = hidden.get("evaluator") or environment.evaluator
    # Another evaluator than the environment's would refuse the environment's settings.
    inherited = environment.evaluator_settings if evaluator == environment.evaluator else {}
    settings = {**inherited, **hidden.get("evaluator_settings", {})}
    return evaluator, settings, dict(hidden.get("evaluator_payload", {}))


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return what tells settings from others: the SHA-256 of their sorted JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
