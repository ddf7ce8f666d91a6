"""Groups: submit, list, count, read, cancel."""

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.db import transaction
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiExample, OpenApiResponse, extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import GroupFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin, visible_experiment
from rollouts.api.serializers.groups import (
    GroupContent,
    GroupCounts,
    GroupDetail,
    GroupOutput,
    GroupsInput,
    SubmittedGroups,
)
from rollouts.api.streams import TrajectoryFormatsMixin, trajectories_response
from rollouts.models import Experiment, Group, Rollout
from rollouts.services import arrow
from rollouts.services.cancel import cancel_group
from rollouts.services.group_counts import count_groups
from rollouts.services.inline import add_inline_tasks
from rollouts.services.submit import GroupRequest, submit_groups

_GROUPS = Group.objects.select_related("task", "environment").defer("environment__files")
_BINARY = {"type": "string", "format": "binary"}
_CONTENT = {
    (200, "application/json"): GroupContent,
    (200, "application/x-ndjson"): OpenApiResponse(_BINARY, description="One a line."),
    (200, arrow.MEDIA_TYPE): OpenApiResponse(_BINARY, description="One segment a row."),
}


def rollout_ids(groups: Iterable[UUID]) -> dict[UUID, list[str]]:
    """Return the ids of the groups' rollouts by group, in sample order."""
    rows = Rollout.objects.filter(group__in=list(groups)).order_by("sequence", "sample")
    found: dict[UUID, list[str]] = {}
    for group_id, rollout_id in rows.values_list("group_id", "pk"):
        found.setdefault(group_id, []).append(str(rollout_id))
    return found


def _requests(experiment: Experiment, entries: list[dict[str, Any]]) -> list[GroupRequest]:
    inline = [entry["inline"] for entry in entries if "inline" in entry]
    if not inline:
        return [GroupRequest(**entry) for entry in entries]
    stored = iter(add_inline_tasks(experiment=experiment, tasks=inline))
    named = [
        {**entry, "task": next(stored).pk} if "inline" in entry else entry for entry in entries
    ]
    return [
        GroupRequest(**{name: value for name, value in entry.items() if name != "inline"})
        for entry in named
    ]


class ExperimentGroupViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    viewsets.GenericViewSet[Group],
):
    """Groups of one experiment."""

    queryset = _GROUPS
    serializer_class = GroupOutput
    filterset_class = GroupFilter

    @extend_schema(
        request=GroupsInput,
        responses={202: SubmittedGroups},
        examples=[
            OpenApiExample(
                "Two groups",
                value={"groups": [{"task_ref": "hello-file", "samples": 8}, {"task_ref": "sum"}]},
                request_only=True,
            )
        ],
    )
    @idempotent()
    def create(self, request: Request, experiment_id: UUID) -> Response:
        """Submit groups, all or none; a bare list of them is accepted too."""
        experiment = visible_experiment(request, experiment_id)
        body = {"groups": request.data} if isinstance(request.data, list) else request.data
        given = GroupsInput(data=body)
        given.is_valid(raise_exception=True)
        with transaction.atomic():
            requests = _requests(experiment, given.validated_data["groups"])
            groups = submit_groups(experiment=experiment, requests=requests)
        ids = rollout_ids(group.pk for group in groups)
        answer = SubmittedGroups({"groups": groups}, context={"rollouts": ids})
        return Response(answer.data, status=status.HTTP_202_ACCEPTED)

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the experiment's groups."""
        visible_experiment(request, kwargs["experiment_id"])
        return super().list(request, *args, **kwargs)

    @extend_schema(responses=GroupCounts)
    def counts(self, request: Request, experiment_id: UUID) -> Response:
        """Count the experiment's groups by state, and the filtered ones by rule."""
        experiment = visible_experiment(request, experiment_id)
        return Response(GroupCounts(count_groups(experiment=experiment)).data)

    def get_queryset(self) -> Any:
        """Return the visible groups of the experiment in the path."""
        return super().get_queryset().filter(experiment_id=self.kwargs.get("experiment_id"))


class GroupViewSet(
    TrajectoryFormatsMixin, VisibleMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Group]
):
    """Groups of every experiment."""

    queryset = _GROUPS
    serializer_class = GroupOutput
    filterset_class = GroupFilter
    lookup_value_converter = "uuid"
    trajectory_actions = frozenset({"trajectories"})

    @extend_schema(responses=GroupDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return a group with the ids of its rollouts."""
        return self._answer(self.get_object(), status.HTTP_200_OK)

    @extend_schema(request=None, responses={202: GroupDetail})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """Cancel what is unfinished; 409 when the group is not open."""
        cancel_group(group_id=self.get_object().pk)
        return self._answer(self.get_object(), status.HTTP_202_ACCEPTED)

    @extend_schema(responses=_CONTENT)
    @action(detail=True)
    def trajectories(self, request: Request, **kwargs: Any) -> HttpResponseBase:
        """Return the trajectories of what is finished, whatever became of the group.

        What was filtered or cancelled can be read too; it is in no batch.
        """
        group = self.get_object()
        finished = Rollout.objects.filter(group=group, outcome__isnull=False, replaced=False)
        return trajectories_response(
            request,
            finished.order_by("sample"),
            described=lambda: JSONRenderer().render(GroupOutput(group).data),
        )

    @staticmethod
    def _answer(group: Group, code: int) -> Response:
        ids = rollout_ids([group.pk])
        return Response(GroupDetail(group, context={"rollouts": ids}).data, status=code)
