"""Policies and their inference servers."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.filters import ServerFilter
from rollouts.api.idempotent import idempotent
from rollouts.api.scoping import VisibleMixin
from rollouts.api.serializers.policies import (
    ClearedOutput,
    ClearInput,
    PolicyInput,
    PolicyOutput,
    ServerInput,
    ServerOutput,
)
from rollouts.models import InferenceServer, Policy
from rollouts.services.policies import create_policy, update_policy
from rollouts.services.servers import clear_servers, register_server, remove_server


class PolicyViewSet(
    VisibleMixin,
    mixins.ListModelMixin,
    mixins.RetrieveModelMixin,
    viewsets.GenericViewSet[Policy],
):
    """Policies: a model, its tokenizer and its current version."""

    queryset = Policy.objects.all()
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
