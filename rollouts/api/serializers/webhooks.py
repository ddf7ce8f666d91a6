"""Webhooks: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.models import Webhook, WebhookDelivery
from rollouts.services.events import EventKind
from rollouts.services.webhook_addresses import MAX_URL
from sandboxes.api.strict import StrictSerializer


class WebhookInput(StrictSerializer):
    """Where events are sent, and which."""

    url = serializers.CharField(max_length=MAX_URL)
    kinds = serializers.ListField(
        child=serializers.ChoiceField(choices=[kind.value for kind in EventKind]),
        required=False,
        default=list,
        help_text="Empty: all. A `resync` is sent in any case.",
    )


class WebhookChanges(StrictSerializer):
    """Changes of a webhook."""

    url = serializers.CharField(max_length=MAX_URL, required=False)
    kinds = serializers.ListField(
        child=serializers.ChoiceField(choices=[kind.value for kind in EventKind]), required=False
    )
    active = serializers.BooleanField(required=False)


class WebhookOutput(serializers.ModelSerializer[Webhook]):
    """A webhook without its secret."""

    kinds = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Webhook
        fields = ["id", "experiment", "url", "kinds", "active", "detail", "created_at"]
        read_only_fields = fields


class WebhookCreated(WebhookOutput):
    """A webhook as its creation answers, the only time that the secret is told."""

    secret = serializers.CharField(
        read_only=True, allow_null=True, help_text="Null when the call is repeated by its key."
    )

    class Meta(WebhookOutput.Meta):
        fields: list[Any] = [*WebhookOutput.Meta.fields, "secret"]
        read_only_fields = fields


class DeliveryOutput(serializers.ModelSerializer[WebhookDelivery]):
    """One event on its way to a receiver."""

    class Meta:
        model = WebhookDelivery
        fields = [
            *("id", "webhook", "kind", "body", "tries", "next_at", "delivered_at"),
            *("detail", "created_at"),
        ]
        read_only_fields = fields
