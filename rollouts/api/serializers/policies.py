"""Policies and inference servers: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.fields import PolicyField
from rollouts.models import InferenceServer, Policy, PolicyUpdate
from rollouts.models.policy import validate_server_url
from rollouts.services.policy_alarms import alarm_of, alarm_of_policy
from rollouts.states import UpdateMode
from sandboxes.api.strict import BIG_INTEGER_MAX, INTEGER_MAX, StrictSerializer
from sandboxes.models import validate_name


class PolicyInput(StrictSerializer):
    """A policy: one model with its tokenizer."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    model = serializers.CharField(max_length=200)
    tokenizer = serializers.CharField(
        max_length=500,
        allow_blank=True,
        help_text="Folder of tokenizer and chat template, on every node; empty: text only.",
    )
    context_tokens = serializers.IntegerField(required=False, min_value=16, max_value=INTEGER_MAX)
    version = serializers.IntegerField(required=False, min_value=0, max_value=BIG_INTEGER_MAX)


class PolicyOutput(serializers.ModelSerializer[Policy]):
    """A policy."""

    alarm = serializers.SerializerMethodField()

    class Meta:
        model = Policy
        fields = [
            "id",
            "name",
            "model",
            "tokenizer",
            "context_tokens",
            "version",
            "alarm",
            "created_at",
        ]
        read_only_fields = fields

    def get_alarm(self, policy: Policy) -> str:
        """Return what is wrong with its last update, in words; empty: nothing."""
        return alarm_of_policy(policy)


class UpdateInput(StrictSerializer):
    """An update of a policy's weights to begin."""

    version = serializers.IntegerField(
        min_value=1, max_value=BIG_INTEGER_MAX, help_text="Above the policy's present version."
    )
    mode = serializers.ChoiceField(
        choices=UpdateMode.values,
        help_text="`drain-calls` waits for running generations, `drain-rollouts` for running "
        "rollouts, `abort` cuts generations, which go on later from the tokens they had, `none` "
        "lets them run.",
    )
    control = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Have the service pause and resume the servers, where its operator allows it.",
    )


class AbandonInput(StrictSerializer):
    """Why an update is abandoned."""

    detail = serializers.CharField(required=False, allow_blank=True, max_length=1000)


class ServerAnswerOutput(serializers.Serializer[Any]):
    """What one server said of its weights."""

    server = serializers.UUIDField()
    url = serializers.CharField()
    version = serializers.IntegerField(allow_null=True)
    said = serializers.CharField(help_text="`not told`: the server does not tell its version.")
    ok = serializers.BooleanField()


class UpdateOutput(serializers.ModelSerializer[PolicyUpdate]):
    """An update of a policy's weights."""

    servers = ServerAnswerOutput(many=True, read_only=True)
    alarm = serializers.SerializerMethodField()

    class Meta:
        model = PolicyUpdate
        fields = [
            "id",
            "policy",
            "number",
            "from_version",
            "to_version",
            "mode",
            "control",
            "state",
            "detail",
            "alarm",
            "servers",
            "created_at",
            "paused_at",
            "ready_at",
            "ended_at",
            "released_at",
        ]
        read_only_fields = fields

    def get_alarm(self, update: PolicyUpdate) -> str:
        """Return what is wrong with it, in words: it is about to time out, or did; or empty."""
        return alarm_of(update)


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
