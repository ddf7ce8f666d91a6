"""Policies and inference servers: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.fields import PolicyField
from rollouts.models import InferenceServer, Policy
from rollouts.models.policy import validate_server_url
from sandboxes.api.strict import BIG_INTEGER_MAX, INTEGER_MAX, StrictSerializer
from sandboxes.models import validate_name


class PolicyInput(StrictSerializer):
    """A policy: one model with its tokenizer."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    model = serializers.CharField(max_length=200)
    tokenizer = serializers.CharField(
        max_length=500, help_text="Folder of tokenizer and chat template, on every node."
    )
    context_tokens = serializers.IntegerField(required=False, min_value=16, max_value=INTEGER_MAX)
    version = serializers.IntegerField(required=False, min_value=0, max_value=BIG_INTEGER_MAX)


class PolicyOutput(serializers.ModelSerializer[Policy]):
    """A policy."""

    class Meta:
        model = Policy
        fields = ["id", "name", "model", "tokenizer", "context_tokens", "version", "created_at"]
        read_only_fields = fields


class ServerInput(StrictSerializer):
    """An inference server to register."""

    policy = PolicyField(help_text="Name or id.")
    url = serializers.CharField(
        max_length=500, validators=[validate_server_url], help_text="Base address, http or https."
    )
    kind = serializers.CharField(required=False, max_length=32)
    max_in_flight = serializers.IntegerField(required=False, min_value=1, max_value=INTEGER_MAX)


class ServerOutput(serializers.ModelSerializer[InferenceServer]):
    """An inference server and its last health check."""

    policy = serializers.SlugRelatedField[Policy](slug_field="name", read_only=True)

    class Meta:
        model = InferenceServer
        fields = [
            "id",
            "policy",
            "url",
            "kind",
            "max_in_flight",
            "state",
            "healthy",
            "detail",
            "checked_at",
            "created_at",
        ]
        read_only_fields = fields


class ClearInput(StrictSerializer):
    """Whose servers to remove."""

    policy = PolicyField(required=False, help_text="Name or id; absent: those of every policy.")


class ClearedOutput(serializers.Serializer[Any]):
    """How many servers were removed."""

    removed = serializers.IntegerField()
