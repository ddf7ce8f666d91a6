"""Rollouts: list, detail, attempts, trajectory, cancel."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import RolloutFilter
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.rollouts import (
    AttemptOutput,
    RolloutDetail,
    RolloutOutput,
    TrajectorySchema,
)
from rollouts.models import Rollout
from rollouts.services.cancel import cancel_rollout
from rollouts.services.trajectories import read_trajectory


class RolloutViewSet(VisibleMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Rollout]):
    """Episodes."""

    queryset = Rollout.objects.select_related("group__task", "environment", "node").defer(
        "environment__files"
    )
    serializer_class = RolloutOutput
    filterset_class = RolloutFilter
    lookup_value_converter = "uuid"

    @extend_schema(responses=RolloutDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return a rollout."""
        return Response(RolloutDetail(self.get_object()).data)

    @extend_schema(responses=AttemptOutput(many=True), filters=False)
    @action(detail=True, pagination_class=None)
    def attempts(self, request: Request, **kwargs: Any) -> Response:
        """Return every try at every stage, oldest first."""
        attempts = self.get_object().attempts.select_related("node", "worker")
        return Response(AttemptOutput(attempts, many=True).data)

    @extend_schema(responses=TrajectorySchema)
    @action(detail=True)
    def trajectory(self, request: Request, **kwargs: Any) -> Response:
        """Return the trajectory; 404 while there is none."""
        self.queryset = Rollout.objects.select_related("group__task", "environment", "trajectory")
        return Response(read_trajectory(rollout=self.get_object()))

    @extend_schema(request=None, responses={202: RolloutDetail})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """Cancel a rollout; 409 when it is done."""
        cancel_rollout(rollout_id=self.get_object().pk)
        return Response(RolloutDetail(self.get_object()).data, status=status.HTTP_202_ACCEPTED)
