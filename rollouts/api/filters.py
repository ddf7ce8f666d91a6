"""Filters of the trainer's lists."""

from typing import Any

from django_filters import rest_framework as filters

from rollouts.models import Batch, Experiment, Group, InferenceServer, Rollout, Task, TaskImport
from rollouts.states import (
    BatchState,
    ExperimentState,
    GroupState,
    ImportState,
    Outcome,
    RolloutState,
    ServerState,
    StopReason,
)


class ExperimentFilter(filters.FilterSet):
    """Experiments by name, state and policy."""

    name = filters.CharFilter()
    state = filters.MultipleChoiceFilter(choices=ExperimentState.choices)
    policy = filters.CharFilter(field_name="policy__name")

    class Meta:
        model = Experiment
        fields: list[str] = []


class GroupFilter(filters.FilterSet):
    """Groups by experiment, state, task and batch, and by the rule that filtered them."""

    experiment = filters.UUIDFilter(field_name="experiment_id")
    state = filters.MultipleChoiceFilter(choices=GroupState.choices)
    task = filters.UUIDFilter(field_name="task_id")
    task_ref = filters.CharFilter(field_name="task__ref")
    batch = filters.UUIDFilter(field_name="batch_id")
    rule = filters.CharFilter(field_name="filter_rule")

    class Meta:
        model = Group
        fields: list[str] = []


class RolloutFilter(filters.FilterSet):
    """Rollouts by where they belong, where they stand, how they ended and where they ran."""

    experiment = filters.UUIDFilter(field_name="experiment_id")
    group = filters.UUIDFilter(field_name="group_id")
    task = filters.UUIDFilter(field_name="group__task_id")
    batch = filters.UUIDFilter(field_name="group__batch_id")
    state = filters.MultipleChoiceFilter(choices=RolloutState.choices)
    outcome = filters.MultipleChoiceFilter(choices=Outcome.choices)
    stop_reason = filters.MultipleChoiceFilter(choices=StopReason.choices)
    failure_code = filters.CharFilter()
    node = filters.CharFilter(field_name="node__name")
    created_after = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte")
    created_before = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="lt")

    class Meta:
        model = Rollout
        fields: list[str] = []


class BatchFilter(filters.FilterSet):
    """Batches by experiment and state."""

    experiment = filters.UUIDFilter(field_name="experiment_id")
    state = filters.MultipleChoiceFilter(choices=BatchState.choices)

    class Meta:
        model = Batch
        fields: list[str] = []


class TaskFilter(filters.FilterSet):
    """Tasks by reference and environment."""

    ref = filters.CharFilter()
    environment = filters.CharFilter(field_name="environment__name")
    flaky = filters.BooleanFilter(
        method="keep_flaky", label="Scored differently when it was repeated."
    )

    class Meta:
        model = Task
        fields: list[str] = []

    def keep_flaky(self, queryset: Any, name: str, value: bool) -> Any:
        """Keep the flaky tasks, or the others."""
        return queryset.flaky() if value else queryset.steady()


class TaskImportFilter(filters.FilterSet):
    """Imports by task set, format and state."""

    set_name = filters.CharFilter()
    format = filters.CharFilter()
    state = filters.MultipleChoiceFilter(choices=ImportState.choices)

    class Meta:
        model = TaskImport
        fields: list[str] = []


class ServerFilter(filters.FilterSet):
    """Inference servers by policy, state and health."""

    policy = filters.CharFilter(field_name="policy__name")
    state = filters.MultipleChoiceFilter(choices=ServerState.choices)
    healthy = filters.BooleanFilter()

    class Meta:
        model = InferenceServer
        fields: list[str] = []
