"""Policies and their inference servers."""

from typing import Any
from uuid import UUID

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import ServerFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.policies import (
    AbandonInput,
    ClearedOutput,
    ClearInput,
    PolicyInput,
    PolicyOutput,
    ServerInput,
    ServerOutput,
    UpdateInput,
    UpdateOutput,
)
from rollouts.models import InferenceServer, Policy, PolicyUpdate
from rollouts.services.policies import create_policy, update_policy
from rollouts.services.policy_alarms import last_updates
from rollouts.services.policy_updates import (
    abandon_update,
    begin_update,
    check_ready,
    complete_update,
    find_update,
)
from rollouts.services.servers import clear_servers, register_server, remove_server


class PolicyViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    viewsets.GenericViewSet[Policy],
):
    """Policies: a model, its tokenizer and its current version."""

    queryset = Policy.objects.prefetch_related(last_updates())
    serializer_class = PolicyOutput
    required_scope = "policy"
    lookup_value_converter = "uuid"

    @extend_schema(request=PolicyInput, responses={201: PolicyOutput})
    @idempotent()
    def create(self, request: Request) -> Response:
        """Create a policy."""
        given = PolicyInput(data=request.data)
        given.is_valid(raise_exception=True)
        policy = create_policy(owner=request.user, **given.validated_data)
        return Response(PolicyOutput(policy).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=PolicyInput, responses=PolicyOutput)
    def partial_update(self, request: Request, **kwargs: Any) -> Response:
        """Change a policy."""
        policy = self.get_object()
        given = PolicyInput(data=request.data, partial=True)
        given.is_valid(raise_exception=True)
        changed = update_policy(policy_id=policy.pk, **given.validated_data)
        return Response(PolicyOutput(changed).data)


class PolicyUpdateViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    viewsets.GenericViewSet[PolicyUpdate],
):
    """Weight updates of one policy."""

    queryset = PolicyUpdate.objects.all()
    serializer_class = UpdateOutput
    required_scope = "policy"

    @extend_schema(request=UpdateInput, responses={202: UpdateOutput})
    @idempotent()
    def create(self, request: Request, policy_id: UUID) -> Response:
        """Begin an update; ask for it until it is `ready`."""
        policy = _visible_policy(request, policy_id)
        given = UpdateInput(data=request.data)
        given.is_valid(raise_exception=True)
        update = begin_update(policy_id=policy.pk, asked_by=request.user, **given.validated_data)
        return Response(UpdateOutput(update).data, status=status.HTTP_202_ACCEPTED)

    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Return the policy's updates, the newest first."""
        _visible_policy(request, kwargs["policy_id"])
        return super().list(request, *args, **kwargs)

    def retrieve(self, request: Request, policy_id: UUID, number: int) -> Response:
        """Return an update as it stands now."""
        policy = _visible_policy(request, policy_id)
        found = find_update(policy_id=policy.pk, number=number)
        return Response(UpdateOutput(check_ready(update_id=found.pk)).data)

    @extend_schema(request=None, responses=UpdateOutput)
    def complete(self, request: Request, policy_id: UUID, number: int) -> Response:
        """Go on with the new version; 409 when a server says another. Again: changes nothing."""
        policy = _visible_policy(request, policy_id)
        return Response(UpdateOutput(complete_update(policy_id=policy.pk, number=number)).data)

    @extend_schema(request=AbandonInput, responses=UpdateOutput)
    def abandon(self, request: Request, policy_id: UUID, number: int) -> Response:
        """Go on with the old version. Again: changes nothing."""
        policy = _visible_policy(request, policy_id)
        given = AbandonInput(data=request.data)
        given.is_valid(raise_exception=True)
        update = abandon_update(
            policy_id=policy.pk, number=number, why=given.validated_data.get("detail", "")
        )
        return Response(UpdateOutput(update).data)

    def get_queryset(self) -> Any:
        """Return the visible updates of the policy in the path."""
        return super().get_queryset().filter(policy_id=self.kwargs.get("policy_id"))


def _visible_policy(request: Request, policy_id: UUID) -> Policy:
    policy = Policy.objects.visible_to(request.user, request.auth).filter(pk=policy_id).first()
    if policy is None:
        raise Http404
    return policy


class ServerViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    viewsets.GenericViewSet[InferenceServer],
):
    """Inference servers that are registered."""

    queryset = InferenceServer.objects.registered().select_related("policy")
    serializer_class = ServerOutput
    filterset_class = ServerFilter
    required_scope = "policy"
    lookup_value_converter = "uuid"

    @extend_schema(request=ServerInput, responses={201: ServerOutput})
    @idempotent()
    def create(self, request: Request) -> Response:
        """Register an inference server; one that is there already is set active again."""
        given = ServerInput(data=request.data, context={"request": request})
        given.is_valid(raise_exception=True)
        server = register_server(**given.validated_data)
        return Response(ServerOutput(server).data, status=status.HTTP_201_CREATED)

    def destroy(self, request: Request, **kwargs: Any) -> Response:
        """Send a server no new work; what runs there may finish."""
        remove_server(server_id=self.get_object().pk)
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=ClearInput, responses=ClearedOutput)
    @action(detail=False, methods=["post"])
    def clear(self, request: Request) -> Response:
        """Remove all servers of a policy, or of every policy of the caller's."""
        given = ClearInput(data=request.data, context={"request": request})
        given.is_valid(raise_exception=True)
        named = given.validated_data.get("policy")
        policies = Policy.objects.visible_to(request.user) if named is None else [named]
        removed = clear_servers(policies=policies)
        return Response(ClearedOutput({"removed": removed}).data)
