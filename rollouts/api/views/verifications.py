"""Verifications of environments: begin, follow, read the report, cancel."""

from typing import Any

from django.shortcuts import get_object_or_404
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.idempotent import idempotent
from rollouts.api.serializers.verifications import (
    VerificationDetail,
    VerificationInput,
    VerificationOutput,
)
from rollouts.models import Verification
from rollouts.services.verifications import begin_verification, cancel_verification
from sandboxes.models import Environment


class EnvironmentVerificationViewSet(mixins.ListModelMixin, viewsets.GenericViewSet[Verification]):
    """Verifications of one version of an environment."""

    queryset = Verification.objects.select_related("environment", "task_set", "requested_by").defer(
        "report"
    )
    serializer_class = VerificationOutput
    required_scope = "operate"
    read_scope = "operate"

    def get_queryset(self) -> Any:
        """Return those of the version in the path."""
        return super().get_queryset().filter(environment=self.kwargs.get("environment_id"))

    @extend_schema(request=VerificationInput, responses={202: VerificationOutput})
    @idempotent()
    def create(self, request: Request, **kwargs: Any) -> Response:
        """Solve some tasks as their authors did, leave them alone, and see what that earns."""
        environment = get_object_or_404(Environment, pk=kwargs["environment_id"])
        given = VerificationInput(data=request.data)
        given.is_valid(raise_exception=True)
        begun = begin_verification(
            environment=environment, requested_by=request.user, **given.validated_data
        )
        return Response(VerificationOutput(begun).data, status=status.HTTP_202_ACCEPTED)


class VerificationViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Verification]
):
    """Verifications of all environments."""

    queryset = Verification.objects.select_related("environment", "task_set", "requested_by")
    serializer_class = VerificationOutput
    required_scope = "operate"
    read_scope = "operate"
    lookup_value_converter = "uuid"

    def get_queryset(self) -> Any:
        """Return them all; a list without their reports."""
        found = super().get_queryset()
        return found.defer("report") if self.action == "list" else found

    @extend_schema(responses=VerificationDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return a verification with how far it is, and what it found once it has ended."""
        return Response(VerificationDetail(self.get_object()).data)

    @extend_schema(request=None, responses=VerificationDetail)
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """End it with what it has; the environment stays as it is."""
        cancel_verification(verification_id=self.get_object().pk)
        return Response(VerificationDetail(self.get_object()).data)
