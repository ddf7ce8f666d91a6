"""Input that refuses what it does not know."""

from collections.abc import Mapping
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

INTEGER_MAX = 2**31 - 1
BIG_INTEGER_MAX = 2**63 - 1


class StrictSerializer(serializers.Serializer[Any]):
    """Refuse unknown fields, naming each."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the validated values. Raises ValidationError."""
        if isinstance(data, Mapping):
            unknown = sorted(str(name) for name in set(data) - set(self.fields))
            if unknown:
                known = ", ".join(self.fields)
                raise serializers.ValidationError(
                    {name: [f"Unknown field; known: {known}."] for name in unknown}
                )
        return super().to_internal_value(data)


@extend_schema_field(OpenApiTypes.OBJECT)
class JsonObjectField(serializers.JSONField):
    """A JSON object."""

    default_error_messages = {"not_object": "Must be an object."}

    def to_internal_value(self, data: Any) -> Any:
        """Return the object. Raises ValidationError."""
        value = super().to_internal_value(data)
        if not isinstance(value, dict):
            self.fail("not_object")
        return value
