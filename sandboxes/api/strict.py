"""Input that refuses what it does not know and what PostgreSQL or JSON cannot hold."""

import json
import math
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


def check_json(value: Any) -> None:
    """Refuse what `jsonb` cannot hold: NUL, lone surrogates, numbers that are not finite."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):
        raise serializers.ValidationError(
            "It holds a number that is not finite, half a surrogate pair, or is nested too deep."
        ) from None
    if "\\u0000" in text and "\0" in _all_text(value):
        raise serializers.ValidationError("Text with a NUL character cannot be stored.")


def _all_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(f"{_all_text(key)}{_all_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "".join(_all_text(each) for each in value)
    return ""


@extend_schema_field(OpenApiTypes.OBJECT)
class JsonObjectField(serializers.JSONField):
    """A JSON object that can be stored."""

    default_error_messages = {"not_object": "Must be an object."}

    def to_internal_value(self, data: Any) -> Any:
        """Return the object. Raises ValidationError."""
        value = super().to_internal_value(data)
        if not isinstance(value, dict):
            self.fail("not_object")
        check_json(value)
        return value


class FiniteFloatField(serializers.FloatField):
    """A number that JSON can say: `1e999` reads as infinity and is refused."""

    default_error_messages = {"not_finite": "Must be a finite number."}

    def to_internal_value(self, data: Any) -> float:
        """Return the number. Raises ValidationError."""
        value = super().to_internal_value(data)
        if not math.isfinite(value):
            self.fail("not_finite")
        return value
