"""Fields of the trainer's calls: options with bounds, and things named by name or id."""

from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import Direction
from rest_framework import serializers

from rollouts.exceptions import InvalidValue
from rollouts.models import Policy, TaskSet
from rollouts.options import Budgets, Sampling


class OptionsField(serializers.Field[Any, Any, Any, Any]):
    """An object of numbers, each within the bounds that its options class gives."""

    def __init__(self, options: type[Sampling] | type[Budgets], **kwargs: Any) -> None:
        self.options = options
        super().__init__(**kwargs)

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Return the given options, checked but without defaults. Raises ValidationError."""
        try:
            parsed = self.options.parse(data).as_dict()
        except InvalidValue as error:
            raise serializers.ValidationError(str(error)) from None
        return {name: parsed[name] for name in data}

    def to_representation(self, value: Any) -> Any:
        """Return the stored options."""
        return value


class OptionsFieldSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """Describe an OptionsField by the bounds and defaults of its options."""

    target_class = OptionsField

    def map_serializer_field(self, auto_schema: AutoSchema, direction: Direction) -> dict[str, Any]:
        """Return the JSON schema."""
        defaults = self.target.options().as_dict()
        properties = {
            name: {
                "type": "integer" if whole else "number",
                "minimum": int(low) if whole else low,
                "maximum": int(high) if whole else high,
                **({"nullable": True} if defaults[name] is None else {"default": defaults[name]}),
            }
            for name, (low, high, whole) in self.target.options.bounds().items()
        }
        return {"type": "object", "properties": properties, "additionalProperties": False}


def named(queryset: QuerySet[Any], values: list[str]) -> dict[str, Any]:
    """Return the rows that the values name, by value; each is a name or an id."""
    ids = {value: as_uuid(value) for value in values}
    rows = queryset.filter(
        Q(name__in=values) | Q(pk__in=[each for each in ids.values() if each is not None])
    )
    by_key: dict[Any, Any] = {}
    for row in rows:
        by_key[row.name] = by_key[row.pk] = row
    found = {value: by_key.get(ids[value] or value, by_key.get(value)) for value in values}
    return {value: row for value, row in found.items() if row is not None}


def as_uuid(value: str) -> UUID | None:
    """Return the value as a UUID, or None when it is none."""
    try:
        return UUID(value)
    except ValueError:
        return None


class PolicyField(serializers.CharField):
    """A policy by its name or id."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the policy. Raises ValidationError."""
        value = super().to_internal_value(data)
        request = self.context["request"]
        found = named(Policy.objects.visible_to(request.user), [value])
        if not found:
            raise serializers.ValidationError(f"There is no policy {value!r}.")
        return found[value]


class TaskSetsField(serializers.ListField):
    """Task sets by their names or ids."""

    child = serializers.CharField(max_length=99)

    def to_internal_value(self, data: Any) -> Any:
        """Return the task sets, each once. Raises ValidationError."""
        values = super().to_internal_value(data)
        found = named(TaskSet.objects.all(), values)
        missing = [value for value in values if value not in found]
        if missing:
            raise serializers.ValidationError(f"There is no task set {missing[0]!r}.")
        return list({row.pk: row for row in found.values()}.values())
