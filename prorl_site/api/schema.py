"""OpenAPI: problems as the answer to every fault, the idempotency header, how to log in."""

from typing import Any

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import build_bearer_security_scheme_object
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from prorl_site.api.problems import MEDIA_TYPE
from rollouts.api.idempotent import HEADER


class ProblemSchema(serializers.Serializer[Any]):
    """Problem details (RFC 9457) with a stable `code`."""

    type = serializers.CharField()
    title = serializers.CharField()
    status = serializers.IntegerField()
    code = serializers.CharField()
    detail = serializers.CharField()
    errors = serializers.DictField(  # type: ignore[assignment]
        required=False, help_text="Faults by field, when the body or a filter is wrong."
    )

    class Meta:
        ref_name = "Problem"


class ApiSchema(AutoSchema):
    """Add what every call has in common."""

    def get_override_parameters(self) -> list[Any]:
        """Return the headers that a call takes."""
        parameters = list(super().get_override_parameters())
        action = getattr(self.view, getattr(self.view, "action", None) or "", None)
        if getattr(action, "takes_idempotency_key", False):
            parameters.append(
                OpenApiParameter(
                    HEADER,
                    OpenApiTypes.STR,
                    OpenApiParameter.HEADER,
                    description="Same key and body: the same resource, made once.",
                )
            )
        return parameters

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        bodies = super()._get_response_bodies(direction)
        problem = OpenApiResponse(ProblemSchema, description="Any fault.")
        bodies["default"] = self._get_response_for_code(  # type: ignore[no-untyped-call]
            problem, "default", media_types=[MEDIA_TYPE], direction=direction
        )
        return bodies


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Describe a trainer's token."""

    target_class = "prorl_site.api.authentication.TrainerTokenAuthentication"
    name = "trainerToken"

    def get_security_definition(self, auto_schema: AutoSchema) -> Any:
        """Return the security scheme."""
        return build_bearer_security_scheme_object(
            header_name="Authorization",
            token_prefix="Bearer",  # noqa: S106
        )


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Describe an operator's session."""

    target_class = "prorl_site.api.authentication.OperatorSessionAuthentication"
    name = "operatorSession"

    def get_security_definition(self, auto_schema: AutoSchema) -> Any:
        """Return the security scheme."""
        return {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME}
