"""Operators' calls: images, environments, nodes, sandboxes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.request import Request
from rest_framework.response import Response

from sandboxes.api.filters import EnvironmentFilter, NodeFilter, SandboxFilter
from sandboxes.api.image_builds import ImageBuildsMixin
from sandboxes.api.serializers import (
    EnvironmentInput,
    EnvironmentOutput,
    EnvironmentRule,
    ImageDetail,
    ImageInput,
    ImageOutput,
    NodeInput,
    NodeOutput,
    SandboxOutput,
)
from sandboxes.models import Environment, Image, Node, Sandbox
from sandboxes.services.catalogue import save_environment
from sandboxes.services.images import define_image
from sandboxes.services.node_settings import change_node


class ImageViewSet(ImageBuildsMixin, mixins.ListModelMixin, viewsets.GenericViewSet[Image]):
    """Images that sandboxes start from."""

    queryset = Image.objects.all()
    serializer_class = ImageOutput
    required_scope = "operate"
    read_scope = "read"
    lookup_value_converter = "uuid"

    @extend_schema(request=ImageInput, responses={201: ImageOutput})
    def create(self, request: Request) -> Response:
        """Register an image, or change what the one of that name is made from."""
        given = ImageInput(data=request.data)
        given.is_valid(raise_exception=True)
        image = define_image(**given.validated_data)
        return Response(ImageOutput(image).data, status=status.HTTP_201_CREATED)

    @extend_schema(responses=ImageDetail)
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return an image with all that it is made from."""
        return Response(ImageDetail(self.get_object()).data)


class EnvironmentViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Environment]
):
    """Catalogue of environments; every edit is a new version."""

    queryset = Environment.objects.select_related("image")
    serializer_class = EnvironmentOutput
    filterset_class = EnvironmentFilter
    required_scope = "operate"
    lookup_value_converter = "uuid"
    registries: ClassVar[Mapping[str, Collection[str]]] = {}
    rules: ClassVar[Sequence[EnvironmentRule]] = ()

    @extend_schema(request=EnvironmentInput, responses={201: EnvironmentOutput})
    def create(self, request: Request) -> Response:
        """Make the next version of an environment; equal values give the newest one again."""
        context = {"registries": self.registries, "rules": self.rules}
        given = EnvironmentInput(data=request.data, context=context)
        given.is_valid(raise_exception=True)
        environment = save_environment(**given.validated_data)
        return Response(EnvironmentOutput(environment).data, status=status.HTTP_201_CREATED)


class NodeViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Node]):
    """Nodes: capacity and draining."""

    queryset = Node.objects.with_slots_used()
    serializer_class = NodeOutput
    filterset_class = NodeFilter
    required_scope = "operate"
    read_scope = "operate"
    lookup_value_converter = "uuid"

    @extend_schema(request=NodeInput, responses=NodeOutput)
    def partial_update(self, request: Request, **kwargs: Any) -> Response:
        """Change capacity or draining."""
        node = self.get_object()
        given = NodeInput(data=request.data)
        given.is_valid(raise_exception=True)
        change_node(node_id=node.pk, **given.validated_data)
        return Response(NodeOutput(self.get_object()).data)


class SandboxViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Sandbox]
):
    """Sandboxes, present and past."""

    queryset = Sandbox.objects.select_related("node")
    serializer_class = SandboxOutput
    filterset_class = SandboxFilter
    read_scope = "operate"
    lookup_value_converter = "uuid"
