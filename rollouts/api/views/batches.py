"""Batches: lease, read again, acknowledge, give back, extend."""

from typing import Any
from uuid import UUID

from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import mixins, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import BatchFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin, visible_experiment
from rollouts.api.serializers.batches import (
    BatchContent,
    BatchInput,
    BatchOutput,
    ExtendInput,
)
from rollouts.api.streams import TrajectoryFormatsMixin, batch_response
from rollouts.api.waiting import NotEnoughYet
from rollouts.exceptions import RolloutError
from rollouts.models import Batch
from rollouts.services import arrow
from rollouts.services.batch_choice import Wish
from rollouts.services.batches import (
    acknowledge_batch,
    extend_batch,
    lease_batch,
    return_batch,
)
from rollouts.services.idempotency import RememberedAnswer
from rollouts.states import BatchState

_CONTENT = {
    (200, "application/json"): BatchContent,
    (200, "application/x-ndjson"): OpenApiResponse(
        {"type": "string", "format": "binary"}, description="One trajectory a line."
    ),
    (200, arrow.MEDIA_TYPE): OpenApiResponse(
        {"type": "string", "format": "binary"},
        description="One segment a row; the schema's metadata describe batch and rollouts.",
    ),
}


class BatchGone(RolloutError):
    """The batch was given back or its lease ran out: its groups may be another's by now."""

    status = 410


def require_content(batch: Batch) -> None:
    """Refuse a batch whose groups are no longer its own. Raises BatchGone."""
    if batch.state == BatchState.RETURNED:
        raise BatchGone("The batch was given back; lease another.", code="batch.returned")
    if batch.state == BatchState.REWOUND:
        raise BatchGone(
            f"The experiment was rewound behind version {batch.policy_version}; lease another.",
            code="batch.rewound",
        )
    leased = batch.state == BatchState.LEASED
    lapsed = leased and not Batch.objects.held().filter(pk=batch.pk).exists()
    if lapsed or batch.state == BatchState.EXPIRED:
        raise BatchGone("The batch's lease has expired; lease another.", code="batch.expired")


def _which(response: Any) -> dict[str, str]:
    """Return which batch it was: its content is in the store."""
    return {"batch": response["Batch-Id"]}


def _same_batch(view: Any, request: Request, answer: RememberedAnswer) -> HttpResponseBase:
    """Return the batch of the first call. Raises BatchGone, Http404."""
    experiment = visible_experiment(request, view.kwargs["experiment_id"])
    batch = Batch.objects.get(pk=answer.body["batch"], experiment=experiment)
    require_content(batch)
    return batch_response(request, batch)


class ExperimentBatchViewSet(
    TrajectoryFormatsMixin,
    VisibleMixin,
    mixins.ListModelMixin,
    viewsets.GenericViewSet[Batch],
):
    """Batches of one experiment."""

    queryset = Batch.objects.all()
    serializer_class = BatchOutput
    filterset_class = BatchFilter
    trajectory_actions = frozenset({"create"})

    @extend_schema(
        request=BatchInput,
        responses={
            **_CONTENT,
            204: OpenApiResponse(description="Fewer groups are finished, or one in front is not."),
        },
    )
    @idempotent(remember=_which, replay=_same_batch)
    def create(self, request: Request, experiment_id: UUID) -> HttpResponseBase:
        """Lease the next finished groups, waiting for them at most `wait_seconds`.

        A batch of this size that came back, by `nack` or because its lease ended, goes first: the
        same groups in the same order.
        """
        experiment = visible_experiment(request, experiment_id)
        given = BatchInput(data=request.data)
        given.is_valid(raise_exception=True)
        wait_seconds: float = given.validated_data.pop("wait_seconds")
        wish = Wish(**given.validated_data)
        batch = lease_batch(experiment=experiment, owner=request.user, **vars(wish))
        if batch is None:
            return NotEnoughYet(experiment_id=experiment.pk, wish=wish, wait_seconds=wait_seconds)
        return batch_response(request, batch)

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the experiment's batches."""
        visible_experiment(request, kwargs["experiment_id"])
        return super().list(request, *args, **kwargs)

    def get_queryset(self) -> Any:
        """Return the visible batches of the experiment in the path."""
        return super().get_queryset().filter(experiment_id=self.kwargs.get("experiment_id"))


class BatchViewSet(
    TrajectoryFormatsMixin, VisibleMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Batch]
):
    """Batches of every experiment."""

    queryset = Batch.objects.all()
    serializer_class = BatchOutput
    filterset_class = BatchFilter
    lookup_value_converter = "uuid"
    trajectory_actions = frozenset({"retrieve"})

    @extend_schema(responses=_CONTENT)
    def retrieve(self, request: Request, **kwargs: Any) -> HttpResponseBase:
        """Return a batch with its trajectories again; 410 when it was given back or expired."""
        batch = self.get_object()
        require_content(batch)
        return batch_response(request, batch)

    @extend_schema(request=None, responses=BatchOutput)
    @action(detail=True, methods=["post"])
    def ack(self, request: Request, **kwargs: Any) -> Response:
        """Say that the batch was consumed; saying it again changes nothing."""
        acknowledge_batch(batch_id=self.get_object().pk)
        return self._answer()

    @extend_schema(request=None, responses=BatchOutput)
    @action(detail=True, methods=["post"])
    def nack(self, request: Request, **kwargs: Any) -> Response:
        """Give the batch back: its groups can be leased again."""
        return_batch(batch_id=self.get_object().pk)
        return self._answer()

    @extend_schema(request=ExtendInput, responses=BatchOutput)
    @action(detail=True, methods=["post"])
    def extend(self, request: Request, **kwargs: Any) -> Response:
        """Lengthen the lease."""
        batch = self.get_object()
        given = ExtendInput(data=request.data)
        given.is_valid(raise_exception=True)
        extend_batch(batch_id=batch.pk, seconds=given.validated_data["seconds"])
        return self._answer()

    def _answer(self) -> Response:
        return Response(BatchOutput(self.get_object()).data)
