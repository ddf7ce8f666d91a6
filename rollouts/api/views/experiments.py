"""Experiments: create, change, pause, resume, stop."""

from typing import Any

from django.db.models import Count
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import ExperimentFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.experiments import (
    ExperimentChanges,
    ExperimentDetail,
    ExperimentInput,
    ExperimentOutput,
    StoppedOutput,
)
from rollouts.exceptions import RolloutError
from rollouts.models import Experiment, Rollout
from rollouts.services.cancel import stop_experiment
from rollouts.services.submit import (
    create_experiment,
    set_experiment_state,
    update_experiment,
)
from rollouts.states import ExperimentState, RolloutState


class BoundToken(RolloutError):
    """A token that is bound to experiments asked for one more."""

    code = "auth.bound_token"
    status = 403


class ExperimentViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    viewsets.GenericViewSet[Experiment],
):
    """Training runs as the service sees them."""

    queryset = Experiment.objects.select_related("policy", "owner").prefetch_related("task_sets")
    serializer_class = ExperimentOutput
    filterset_class = ExperimentFilter
    lookup_value_converter = "uuid"

    @extend_schema(request=ExperimentInput, responses={201: ExperimentOutput})
    @idempotent()
    def create(self, request: Request) -> Response:
        """Create an experiment."""
        token: Any = request.auth
        if token is not None and token.is_bound:
            raise BoundToken("This token is bound to experiments; it cannot create others.")
        given = ExperimentInput(data=request.data, context={"request": request})
        given.is_valid(raise_exception=True)
        experiment = create_experiment(owner=request.user, **given.validated_data)
        return Response(ExperimentOutput(experiment).data, status=status.HTTP_201_CREATED)

    @extend_schema(responses=ExperimentDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return an experiment with the number of its rollouts by state."""
        return self._answer(self.get_object())

    @extend_schema(request=ExperimentChanges, responses=ExperimentDetail)
    def partial_update(self, request: Request, **kwargs: Any) -> Response:
        """Change an experiment; it holds for rollouts not yet started."""
        experiment = self.get_object()
        given = ExperimentChanges(data=request.data, partial=True)
        given.is_valid(raise_exception=True)
        update_experiment(experiment_id=experiment.pk, **given.validated_data)
        return self._answer(self.get_object())

    @extend_schema(request=None, responses=ExperimentDetail)
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, **kwargs: Any) -> Response:
        """Start nothing more; what runs goes on."""
        set_experiment_state(experiment_id=self.get_object().pk, state=ExperimentState.PAUSED)
        return self._answer(self.get_object())

    @extend_schema(request=None, responses=ExperimentDetail)
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, **kwargs: Any) -> Response:
        """Start rollouts again."""
        set_experiment_state(experiment_id=self.get_object().pk, state=ExperimentState.ACTIVE)
        return self._answer(self.get_object())

    @extend_schema(request=None, responses={202: StoppedOutput})
    @action(detail=True, methods=["post"])
    def stop(self, request: Request, **kwargs: Any) -> Response:
        """Cancel all that is unfinished, and accept no more groups."""
        cancelled = stop_experiment(experiment_id=self.get_object().pk)
        body = {"state": ExperimentState.STOPPED, "cancelled": cancelled}
        return Response(StoppedOutput(body).data, status=status.HTTP_202_ACCEPTED)

    @staticmethod
    def _answer(experiment: Experiment) -> Response:
        rows = Rollout.objects.filter(experiment=experiment).order_by()
        found = dict(rows.values_list("state").annotate(count=Count("pk")))
        counts = {state: found.get(state, 0) for state in RolloutState.values}
        return Response(ExperimentDetail(experiment, context={"counts": counts}).data)
