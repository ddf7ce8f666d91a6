"""Experiments: create, change, pause, resume, stop."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from django.db.models import Count, Exists, OuterRef
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import ExperimentFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.experiments import (
    ExperimentChanged,
    ExperimentChanges,
    ExperimentDetail,
    ExperimentInput,
    ExperimentOutput,
    RewindInput,
    RewindOutput,
    StoppedOutput,
)
from rollouts.exceptions import RolloutError
from rollouts.models import Experiment, FeedReturn, Group, Rollout
from rollouts.services.cancel import stop_experiment
from rollouts.services.experiments import (
    create_experiment,
    effects_of,
    set_experiment_state,
    update_experiment,
)
from rollouts.services.rewind import rewind
from rollouts.states import COMING, ExperimentState, RolloutState


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

    queryset = (
        Experiment.objects.select_related("policy", "owner")
        .prefetch_related("task_sets")
        .annotate(has_returns=Exists(FeedReturn.objects.filter(experiment=OuterRef("pk"))))
    )
    serializer_class = ExperimentOutput
    filterset_class = ExperimentFilter
    scope_of_action = {"rewind": "policy"}
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

    @extend_schema(request=ExperimentChanges, responses=ExperimentChanged)
    def partial_update(self, request: Request, **kwargs: Any) -> Response:
        """Change an experiment; `takes_effect` says from what on each change holds."""
        experiment = self.get_object()
        given = ExperimentChanges(data=request.data, partial=True)
        given.is_valid(raise_exception=True)
        changes = given.validated_data
        update_experiment(experiment_id=experiment.pk, **changes)
        effects = {"takes_effect": effects_of(changes)}
        return self._answer(self.get_object(), ExperimentChanged, effects)

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

    @extend_schema(request=RewindInput, responses=RewindOutput)
    @action(detail=True, methods=["post"])
    def rewind(self, request: Request, **kwargs: Any) -> Response:
        """Go back to an older policy version: the trainer restarted from that checkpoint.

        Batches leased at that version or later are open again; what sampled a newer one is
        filtered as `rewound`, and its tasks return to the feed.
        """
        given = RewindInput(data=request.data)
        given.is_valid(raise_exception=True)
        done = rewind(experiment_id=self.get_object().pk, **given.validated_data)
        return Response(RewindOutput(done).data)

    @staticmethod
    def _answer(
        experiment: Experiment,
        kind: type[ExperimentDetail] = ExperimentDetail,
        context: Mapping[str, Any] = MappingProxyType({}),
    ) -> Response:
        rows = Rollout.objects.filter(experiment=experiment).order_by()
        found = dict(rows.values_list("state").annotate(count=Count("pk")))
        counts = {state: found.get(state, 0) for state in RolloutState.values}
        groups = Group.objects.filter(experiment=experiment, state__in=COMING).order_by()
        coming = dict(groups.values_list("state").annotate(count=Count("pk")))
        counted = {
            "counts": counts,
            "coming": {str(state): coming.get(state, 0) for state in COMING},
        }
        return Response(kind(experiment, context={**counted, **context}).data)
