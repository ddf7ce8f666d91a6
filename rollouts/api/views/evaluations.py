"""Evaluation runs: begin, read what they found, compare two."""

from typing import Any

from django.shortcuts import get_object_or_404
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.fields import as_uuid
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.evaluations import (
    ComparisonOutput,
    EvaluationDetail,
    EvaluationInput,
    EvaluationOutput,
)
from rollouts.api.views.experiments import BoundToken
from rollouts.exceptions import UnknownReference
from rollouts.models import EvaluationRun
from rollouts.services.evaluation_report import INTERVALS, compare_runs, report_of
from rollouts.services.evaluations import begin_evaluation

WITH = OpenApiParameter("with", str, required=True, description="The other run's id.")


class EvaluationViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    viewsets.GenericViewSet[EvaluationRun],
):
    """Measurements of policy versions on task sets."""

    queryset = EvaluationRun.objects.select_related("experiment__policy").prefetch_related(
        "experiment__task_sets"
    )
    serializer_class = EvaluationOutput
    lookup_value_converter = "uuid"

    @extend_schema(request=EvaluationInput, responses={202: EvaluationOutput})
    @idempotent()
    def create(self, request: Request) -> Response:
        """Begin an evaluation: every task `samples_per_task` times, before training."""
        token: Any = request.auth
        if token is not None and token.is_bound:
            raise BoundToken("This token is bound to experiments; it cannot create others.")
        given = EvaluationInput(data=request.data, context={"request": request})
        given.is_valid(raise_exception=True)
        run = begin_evaluation(owner=request.user, **given.validated_data)
        return Response(EvaluationOutput(run).data, status=status.HTTP_202_ACCEPTED)

    @extend_schema(responses=EvaluationDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return an evaluation with what it found so far."""
        run = self.get_object()
        return Response(EvaluationDetail(run, context={"report": report_of(run=run)}).data)

    @extend_schema(parameters=[WITH], responses=ComparisonOutput)
    @action(detail=True, methods=["get"])
    def compare(self, request: Request, **kwargs: Any) -> Response:
        """Compare with another run on the same tasks."""
        run = get_object_or_404(self.get_queryset(), pk=kwargs["pk"])
        unknown = sorted(set(request.query_params) - {"with"})
        if unknown:
            raise ValidationError({unknown[0]: ["Unknown parameter; known: with."]})
        wanted = as_uuid(request.query_params.get("with", ""))
        other = self.get_queryset().filter(pk=wanted).first() if wanted else None
        if other is None:
            raise UnknownReference(
                "Name the other run: ?with=<id of an evaluation that you may see>.",
                code="evaluation.unknown",
            )
        found = compare_runs(run=run, other=other)
        body = {
            "run": run.pk,
            "other": other.pk,
            "run_pass_at_1": found.pass_at_1[0],
            "other_pass_at_1": found.pass_at_1[1],
            "intervals": INTERVALS,
            **{name: getattr(found, name) for name in ("complete", "tasks", "left_out")},
            **vars(found.paired),
        }
        return Response(ComparisonOutput(body).data)
