"""Webhooks: register, change, remove, look at deliveries and send them again."""

from typing import Any
from uuid import UUID

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.idempotent import body_of, idempotent
from rollouts.api.scoping import VisibleMixin, visible_experiment
from rollouts.api.serializers.webhooks import (
    DeliveryOutput,
    WebhookChanges,
    WebhookCreated,
    WebhookInput,
    WebhookOutput,
)
from rollouts.models import Webhook, WebhookDelivery
from rollouts.services.webhooks import create_webhook, delete_webhook, redeliver, update_webhook


def _without_secret(response: Any) -> Any:
    """Return what is remembered of a creation: the secret is told once."""
    return {**body_of(response), "secret": None}


class ExperimentWebhookViewSet(
    VisibleMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Webhook]
):
    """Webhooks of one experiment."""

    queryset = Webhook.objects.all()
    serializer_class = WebhookOutput

    @extend_schema(request=WebhookInput, responses={201: WebhookCreated})
    @idempotent(remember=_without_secret)
    def create(self, request: Request, experiment_id: UUID) -> Response:
        """Send an experiment's events to an address; the answer tells the secret, once."""
        experiment = visible_experiment(request, experiment_id)
        given = WebhookInput(data=request.data)
        given.is_valid(raise_exception=True)
        webhook, secret = create_webhook(experiment=experiment, **given.validated_data)
        body = {**WebhookOutput(webhook).data, "secret": secret}
        return Response(body, status=status.HTTP_201_CREATED)

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the experiment's webhooks."""
        visible_experiment(request, kwargs["experiment_id"])
        return super().list(request, *args, **kwargs)

    def get_queryset(self) -> Any:
        """Return the visible webhooks of the experiment in the path."""
        return super().get_queryset().filter(experiment_id=self.kwargs.get("experiment_id"))


class WebhookViewSet(VisibleMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Webhook]):
    """Webhooks of every experiment."""

    queryset = Webhook.objects.all()
    serializer_class = WebhookOutput
    lookup_value_converter = "uuid"

    @extend_schema(request=WebhookChanges, responses=WebhookOutput)
    def partial_update(self, request: Request, **kwargs: Any) -> Response:
        """Change a webhook; one that was switched off is sent again what failed."""
        webhook = self.get_object()
        given = WebhookChanges(data=request.data, partial=True)
        given.is_valid(raise_exception=True)
        changed = update_webhook(webhook_id=webhook.pk, **given.validated_data)
        return Response(WebhookOutput(changed).data)

    def destroy(self, request: Request, **kwargs: Any) -> Response:
        """Remove a webhook; nothing more is sent to it."""
        delete_webhook(webhook_id=self.get_object().pk)
        return Response(status=status.HTTP_204_NO_CONTENT)


class DeliveryViewSet(mixins.ListModelMixin, viewsets.GenericViewSet[WebhookDelivery]):
    """Deliveries of one webhook."""

    queryset = WebhookDelivery.objects.all()
    serializer_class = DeliveryOutput

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the webhook's deliveries, the newest first; old ones are deleted."""
        _visible_webhook(request, kwargs["webhook_id"])
        return super().list(request, *args, **kwargs)

    @extend_schema(request=None, responses={202: DeliveryOutput})
    def redeliver(self, request: Request, webhook_id: UUID, delivery_id: UUID) -> Response:
        """Send a delivery again, under the same id."""
        webhook = _visible_webhook(request, webhook_id)
        delivery = redeliver(webhook_id=webhook.pk, delivery_id=delivery_id)
        return Response(DeliveryOutput(delivery).data, status=status.HTTP_202_ACCEPTED)

    def get_queryset(self) -> Any:
        """Return the deliveries of the webhook in the path."""
        if getattr(self, "swagger_fake_view", False):
            return self.queryset.none()
        return super().get_queryset().filter(webhook_id=self.kwargs["webhook_id"])


def _visible_webhook(request: Request, webhook_id: UUID) -> Webhook:
    found = Webhook.objects.visible_to(request.user, request.auth).filter(pk=webhook_id).first()
    if found is None:
        raise Http404
    return found
