"""Scorings of rollouts and what was kept of them; experiments scored again."""

from typing import Any
from uuid import UUID

from django.http import Http404, HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin, is_operator, visible_experiment
from rollouts.api.serializers.reevaluations import (
    ReevaluationDetail,
    ReevaluationInput,
    ReevaluationOutput,
    RolloutEvaluationOutput,
)
from rollouts.exceptions import UnknownReference
from rollouts.models import Evaluation, Reevaluation, Rollout
from rollouts.services.artefacts import read_evidence
from rollouts.services.reevaluation_report import report_reevaluation
from rollouts.services.reevaluations import begin_reevaluation, cancel_reevaluation
from sandboxes.models import Environment


class RolloutEvaluationViewSet(viewsets.GenericViewSet[Evaluation]):
    """Scorings of one rollout: its own, and those of re-evaluations."""

    queryset = Evaluation.objects.all()
    serializer_class = RolloutEvaluationOutput
    pagination_class = None
    filter_backends = ()

    @extend_schema(responses=RolloutEvaluationOutput(many=True))
    def list(self, request: Request, rollout_id: UUID) -> Response:
        """Return the rollout's scorings, oldest first; none while it is not scored."""
        found = self._evaluations(request, rollout_id).order_by("created_at", "pk")
        return Response(RolloutEvaluationOutput(found, many=True).data)

    @extend_schema(responses={(200, "application/gzip"): OpenApiTypes.BINARY})
    def evidence(self, request: Request, rollout_id: UUID, evaluation_id: UUID) -> HttpResponse:
        """Return what the evaluator was given, as gzip-compressed JSON; 404 when it is not there.

        `artefacts.phases` are its sandboxes in order, with the outputs of their commands and the
        files that were collected, all as base64.
        """
        found = self._evaluations(request, rollout_id).filter(pk=evaluation_id).first()
        if found is None:
            raise Http404
        response = HttpResponse(read_evidence(evaluation=found), content_type="application/gzip")
        name = f"{evaluation_id}.evidence.json.gz"
        response["Content-Disposition"] = f'attachment; filename="{name}"'
        return response

    @staticmethod
    def _evaluations(request: Request, rollout_id: UUID) -> Any:
        visible = Rollout.objects.visible_to(request.user, request.auth)
        if not visible.filter(pk=rollout_id).exists():
            raise Http404
        return Evaluation.objects.filter(rollout=rollout_id)


class ExperimentReevaluationViewSet(mixins.ListModelMixin, viewsets.GenericViewSet[Reevaluation]):
    """Re-evaluations of one experiment."""

    queryset = Reevaluation.objects.select_related("environment")
    serializer_class = ReevaluationOutput
    filter_backends = ()

    def get_queryset(self) -> Any:
        """Return those of the experiment, newest first."""
        if getattr(self, "swagger_fake_view", False):
            return super().get_queryset().none()
        experiment = visible_experiment(self.request, self.kwargs["experiment_id"])
        return super().get_queryset().filter(experiment=experiment)

    @extend_schema(request=ReevaluationInput, responses={202: ReevaluationOutput})
    @idempotent()
    def create(self, request: Request, experiment_id: UUID) -> Response:
        """Have what the experiment's rollouts left scored again; their own rewards stay.

        Name an environment whose evaluator is meant; operators may name an evaluator and settings.
        """
        experiment = visible_experiment(request, experiment_id)
        given = ReevaluationInput(data=request.data)
        given.is_valid(raise_exception=True)
        values = dict(given.validated_data)
        if {"evaluator", "evaluator_settings"} & values.keys() and not is_operator(request):
            # It gets what tasks hide, and may tell it: a judge's prompt goes to any address.
            raise PermissionDenied(
                "An evaluator and settings of your own are for operators (scope 'operate'): name "
                "an environment whose evaluator is meant."
            )
        if "environment" in values:
            values["environment"] = _environment(values["environment"])
        job = begin_reevaluation(owner=request.user, experiment=experiment, **values)
        return Response(ReevaluationOutput(job).data, status=status.HTTP_202_ACCEPTED)


class ReevaluationViewSet(VisibleMixin, viewsets.GenericViewSet[Reevaluation]):
    """Experiments scored again by another evaluator, without new rollouts."""

    queryset = Reevaluation.objects.select_related("environment")
    serializer_class = ReevaluationDetail
    lookup_value_converter = "uuid"

    @extend_schema(responses=ReevaluationDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return a re-evaluation with what it found so far."""
        return self._detail()

    @extend_schema(request=None, responses={202: ReevaluationDetail})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """End a re-evaluation; what it scored stays. 409 when it is over."""
        cancel_reevaluation(job=self.get_object())
        return self._detail(status.HTTP_202_ACCEPTED)

    def _detail(self, code: int = status.HTTP_200_OK) -> Response:
        job = self.get_object()
        context = {"report": report_reevaluation(job=job)}
        return Response(ReevaluationDetail(job, context=context).data, status=code)


def _environment(ref: str) -> Environment:
    """Return the version that a reference names. Raises UnknownReference."""
    name, _at, version = ref.partition("@")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 9 else None
    if _at and not number:
        raise UnknownReference(f"{ref!r} is no environment: write name@version, or its name.")
    found = Environment.objects.named(name, number).first()
    if found is None:
        raise UnknownReference(
            f"There is no environment {ref!r}; GET environments/ lists them.",
            code="environment.unknown",
        )
    return found
