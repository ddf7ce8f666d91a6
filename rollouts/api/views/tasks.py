"""Task sets and their tasks, for reading."""

from typing import Any

from django.db.models import CharField, Count, Exists, OuterRef, Q, Value
from django.db.models.functions import Cast, Concat
from django.shortcuts import get_object_or_404
from rest_framework import mixins, viewsets
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import TaskFilter
from rollouts.api.serializers.tasks import TaskOutput, TaskSetOutput
from rollouts.models import Experiment, Task, TaskSet
from rollouts.services.inline import PREFIX


def visible_task_sets(request: Request) -> Any:
    """Return the imported task sets and the inline ones of the caller's own experiments."""
    own = (
        Experiment.objects.visible_to(request.user, request.auth)
        .annotate(set_name=Concat(Value(PREFIX), Cast("pk", CharField())))
        .filter(set_name=OuterRef("name"))
    )
    return TaskSet.objects.filter(~Q(name__startswith=PREFIX) | Exists(own))


class TaskSetViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[TaskSet]
):
    """Imported data sets."""

    queryset = TaskSet.objects.all()
    serializer_class = TaskSetOutput
    lookup_value_converter = "uuid"

    def get_queryset(self) -> Any:
        """Return the visible task sets with their number of tasks."""
        return visible_task_sets(self.request).annotate(task_count=Count("tasks"))


class TaskViewSet(mixins.ListModelMixin, viewsets.GenericViewSet[Task]):
    """Tasks of one task set."""

    queryset = Task.objects.select_related("environment").defer(
        "payload", "hidden", "environment__files"
    )
    serializer_class = TaskOutput
    filterset_class = TaskFilter

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the tasks of a set."""
        get_object_or_404(visible_task_sets(request), pk=kwargs["task_set_id"])
        return super().list(request, *args, **kwargs)

    def get_queryset(self) -> Any:
        """Return the tasks of the set in the path."""
        return super().get_queryset().filter(task_set_id=self.kwargs.get("task_set_id"))
