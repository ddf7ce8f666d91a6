"""Things that people name on the command line."""

from __future__ import annotations

from uuid import UUID

from prorl_client import Client, Experiment
from prorl_client.errors import ConfigError
from prorl_client.records import TaskSetRecord


class Ambiguous(ConfigError):
    """A name fits several things, or none."""


def find_experiment(client: Client, name_or_id: str) -> Experiment:
    """Return an experiment by its id or its name. Raises NotFound, Ambiguous."""
    if is_uuid(name_or_id):
        return client.experiment(name_or_id)
    found = list(client.experiments(name=name_or_id))
    if not found:
        raise Ambiguous(f"There is no experiment {name_or_id!r}. `prorl experiments` lists them.")
    if len(found) > 1:
        ids = "\n  ".join(each.id for each in found)
        raise Ambiguous(f"Several experiments are named {name_or_id!r}; give an id:\n  {ids}")
    return client.experiment(found[0].id)


def find_task_set(client: Client, name_or_id: str) -> TaskSetRecord:
    """Return a task set by its name or id. Raises Ambiguous."""
    for each in client.task_sets():
        if name_or_id in (each.name, each.id):
            return each
    raise Ambiguous(f"There is no task set {name_or_id!r}. `prorl tasks list` shows them.")


def is_uuid(text: str) -> bool:
    """Tell whether a text is an id."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
