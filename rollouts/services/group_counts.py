"""How many groups an experiment has, by state and by the rule that filtered them."""

from typing import Any

from django.db.models import Count

from rollouts.models import Experiment, Group
from rollouts.states import GroupState


def count_groups(*, experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return `states`, with every state, and `rules`, with each that filtered a group."""
    groups = Group.objects.filter(experiment=experiment).order_by()
    found = dict(groups.values_list("state").annotate(count=Count("pk")))
    filtered = groups.filter(state=GroupState.FILTERED)
    rules = filtered.values_list("filter_rule").annotate(count=Count("pk"))
    return {
        "states": {state: found.get(state, 0) for state in GroupState.values},
        "rules": dict(rules.order_by("filter_rule")),
    }
