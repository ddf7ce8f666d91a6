"""Fields of an experiment's feed, selection and filters: JSON that its own parsers check."""

from collections.abc import Callable, Mapping
from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import Direction
from rest_framework import serializers

from rollouts.exceptions import InvalidValue
from rollouts.feed_options import (
    LEAST_WEIGHT,
    MAX_BATCH_GROUPS,
    MAX_IN_FLIGHT,
    MAX_SKIPPED,
    MOST_WEIGHT,
    FeedSettings,
)
from rollouts.selection_options import (
    CANCEL,
    CARRY_OVER,
    FINISHED,
    MAX_DEADLINE_SECONDS,
    MAX_FILTERS,
    MAX_REPLACEMENTS,
    START,
    Selection,
    parse_filters,
)
from rollouts.text import clean_json

Field = serializers.Field[Any, Any, Any, Any]
Schema = dict[str, Any]


class _ParsedField(Field):
    """A JSON value that a parser of the service checks."""

    schema: Schema = {}

    def to_internal_value(self, data: Any) -> Any:
        """Return what was given, checked. Raises ValidationError."""
        if clean_json(data) != data:
            raise serializers.ValidationError(
                "Holds what cannot be stored: NUL or lone surrogates in a text, numbers that are "
                "not finite, or too many objects inside each other."
            )
        try:
            return self.parse(data)
        except InvalidValue as error:
            raise serializers.ValidationError(str(error)) from None

    def parse(self, data: Any) -> Any:
        """Return the value, or raise InvalidValue."""
        raise NotImplementedError

    def to_representation(self, value: Any) -> Any:
        """Return the stored value."""
        return value


def _whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _given(data: Any, parsed: Callable[[Any], Any]) -> Any:
    """Return the given keys alone, as they were parsed: defaults are the service's to fill in."""
    clean = parsed(data).as_dict()
    return {name: clean[name] for name in data} if isinstance(data, Mapping) else clean


class FeedSettingsField(_ParsedField):
    """How an experiment that pulls draws from its task sets."""

    schema = _object(
        {
            "batch_groups": _whole(1, MAX_BATCH_GROUPS, nullable=True),
            "groups_in_flight": _whole(1, MAX_IN_FLIGHT, nullable=True),
            "seed": _whole(0, 2**62, default=0),
            "shuffle": {"type": "boolean", "default": True},
            "epochs": _whole(1, 1_000_000, nullable=True),
            "weights": {
                "type": "object",
                "additionalProperties": {
                    "type": "number",
                    "minimum": LEAST_WEIGHT,
                    "maximum": MOST_WEIGHT,
                },
            },
            "curriculum": {
                **_object(
                    {
                        "low": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.0},
                        "high": {"type": "number", "minimum": 0, "maximum": 1, "default": 1.0},
                        "min_samples": _whole(1, 1_000_000, default=8),
                        "revisit_epochs": _whole(1, 1_000_000, default=4),
                    }
                ),
                "nullable": True,
            },
            "skip": {
                "type": "array",
                "maxItems": MAX_SKIPPED,
                "items": {"type": "string", "maxLength": 200},
            },
            "skip_flaky": {"type": "boolean", "default": False},
        }
    )

    def parse(self, data: Any) -> Any:
        """Return the given settings, checked but without defaults."""
        return _given(data, FeedSettings.parse)

    def to_representation(self, value: Any) -> Any:
        """Return all settings, those that are not stored by their defaults."""
        return FeedSettings.stored(value).as_dict()


class SelectionField(_ParsedField):
    """Which finished groups make a batch."""

    schema = _object(
        {
            "order": {"type": "string", "enum": [START, FINISHED], "default": START},
            "unfinished": {"type": "string", "enum": [CARRY_OVER, CANCEL], "default": CARRY_OVER},
            "replace_failed": _whole(0, MAX_REPLACEMENTS, default=0),
            "group_deadline_seconds": {
                "type": "number",
                "minimum": 1,
                "maximum": MAX_DEADLINE_SECONDS,
                "nullable": True,
            },
            "min_complete_fraction": {
                "type": "number",
                "minimum": 0,
                "maximum": 1,
                "nullable": True,
            },
        }
    )

    def parse(self, data: Any) -> Any:
        """Return the given settings, checked but without defaults."""
        return _given(data, Selection.parse)

    def to_representation(self, value: Any) -> Any:
        """Return all settings, those that are not stored by their defaults."""
        return Selection.stored(value).as_dict()


class FiltersField(_ParsedField):
    """The rules that keep groups from the trainer, in order."""

    schema = {
        "type": "array",
        "maxItems": MAX_FILTERS,
        "items": {
            "type": "object",
            "properties": {"rule": {"type": "string"}},
            "required": ["rule"],
            "additionalProperties": {},
        },
    }

    def parse(self, data: Any) -> Any:
        """Return the rules with their defaults."""
        return parse_filters(data)


class ParsedFieldSchema(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """Describe these fields by the schemas that they carry."""

    target_class = _ParsedField
    match_subclasses = True

    def map_serializer_field(self, auto_schema: AutoSchema, direction: Direction) -> Schema:
        """Return the JSON schema."""
        schema: Schema = self.target.schema
        return schema
