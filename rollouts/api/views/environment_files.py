"""Environments as files: export, import, and what differs between two versions."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from django.shortcuts import get_object_or_404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status, viewsets
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.fields import as_uuid
from rollouts.api.idempotent import idempotent
from rollouts.api.serializers.verifications import EnvironmentDiff, EnvironmentFile
from rollouts.services.environment_files import (
    diff_environments,
    export_environment,
    import_environment,
)
from sandboxes.api.serializers import EnvironmentOutput
from sandboxes.models import Environment

MEDIA_TYPE = "application/toml"
AGAINST = OpenApiParameter(
    "against", str, description="Id of the version to compare with; left out: the one before."
)


class EnvironmentFileViewSet(viewsets.GenericViewSet[Environment]):
    """Environments as TOML."""

    queryset = Environment.objects.select_related("image")
    serializer_class = EnvironmentFile
    required_scope = "operate"
    filter_backends = ()

    @extend_schema(request=EnvironmentFile, responses={201: EnvironmentOutput})
    @idempotent()
    def create(self, request: Request) -> Response:
        """Make the version that a file describes; equal values give the newest one again."""
        given = EnvironmentFile(data=request.data)
        given.is_valid(raise_exception=True)
        environment = import_environment(text=given.validated_data["toml"])
        return Response(EnvironmentOutput(environment).data, status=status.HTTP_201_CREATED)

    @extend_schema(responses={(200, MEDIA_TYPE): OpenApiTypes.STR})
    def export(self, request: Request, environment_id: UUID) -> HttpResponse:
        """Return a version as TOML, which imports to equal values."""
        environment = get_object_or_404(self.get_queryset(), pk=environment_id)
        return HttpResponse(
            export_environment(environment=environment), content_type=f"{MEDIA_TYPE}; charset=utf-8"
        )

    @extend_schema(parameters=[AGAINST], responses=EnvironmentDiff)
    def diff(self, request: Request, environment_id: UUID) -> Response:
        """Return what differs from another version, or from the one before."""
        after = get_object_or_404(self.get_queryset(), pk=environment_id)
        unknown = sorted(set(request.query_params) - {"against"})
        if unknown:
            raise ValidationError({unknown[0]: ["Unknown parameter; known: against."]})
        before = self._against(after, request.query_params.get("against"))
        found = diff_environments(before=before, after=after)
        body = {
            "before": before.ref,
            "after": after.ref,
            "differences": [
                {
                    "name": each.name,
                    "lines": [{"kind": kind, "text": text} for kind, text in each.lines],
                }
                for each in found
            ],
        }
        return Response(EnvironmentDiff(body).data)

    def _against(self, after: Environment, wanted: str | None) -> Environment:
        if wanted is None:
            earlier = self.get_queryset().filter(name=after.name, version__lt=after.version)
            return earlier.order_by("-version").first() or after
        number = as_uuid(wanted)
        found: Any = self.get_queryset().filter(pk=number).first() if number else None
        if found is None:
            raise ValidationError({"against": [f"There is no environment of the id {wanted!r}."]})
        return found  # type: ignore[no-any-return]
