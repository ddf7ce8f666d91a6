"""Image builds over HTTP: request them, follow their logs, cancel them."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import mixins, serializers, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from sandboxes.api.filters import ImageBuildFilter
from sandboxes.api.strict import StrictSerializer
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.services.images import cancel_build, request_builds

MAX_NODES = 1000


class ImageBuildInput(StrictSerializer):
    """Where to get or check an image."""

    nodes = serializers.ListField(
        child=serializers.CharField(max_length=99),
        required=False,
        min_length=1,
        max_length=MAX_NODES,
        help_text="Names; left out: every node that runs workers now.",
    )
    check_only = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Look at what is there; get it where it is missing.",
    )


class ImageBuildOutput(serializers.ModelSerializer[ImageBuild]):
    """An image on its way onto a node."""

    image = serializers.SlugRelatedField[Image](slug_field="name", read_only=True)
    node = serializers.SlugRelatedField[Node](slug_field="name", read_only=True)
    requested_by = serializers.CharField(
        source="requested_by.username", read_only=True, allow_null=True, default=None
    )

    class Meta:
        model = ImageBuild
        fields = [
            "id",
            "image",
            "node",
            "kind",
            "state",
            "requested_by",
            "attempts",
            "time_limit_seconds",
            "digest",
            "image_bytes",
            "sif_bytes",
            "error_code",
            "error",
            "created_at",
            "started_at",
            "ended_at",
        ]
        read_only_fields = fields


class ImageBuildDetail(ImageBuildOutput):
    """An image build with what it said from an offset on.

    `log_start` is where `log` begins, in characters since the build's beginning: after the offset
    asked for where what was said there is no longer kept. Ask with `log_end` for what follows.
    """

    log = serializers.SerializerMethodField()
    log_start = serializers.SerializerMethodField()
    log_end = serializers.SerializerMethodField()

    class Meta(ImageBuildOutput.Meta):
        fields = [*ImageBuildOutput.Meta.fields, "log", "log_start", "log_end"]

    def _begin(self, build: ImageBuild) -> int:
        wanted = int(self.context.get("offset", 0))
        return min(max(wanted, build.log_start), build.log_start + len(build.log))

    @extend_schema_field(OpenApiTypes.STR)
    def get_log(self, build: ImageBuild) -> str:
        """Return what was said from the offset on."""
        return build.log[self._begin(build) - build.log_start :]

    @extend_schema_field(OpenApiTypes.INT)
    def get_log_start(self, build: ImageBuild) -> int:
        """Return where the text begins."""
        return self._begin(build)

    @extend_schema_field(OpenApiTypes.INT)
    def get_log_end(self, build: ImageBuild) -> int:
        """Return where it ends so far."""
        return build.log_start + len(build.log)


class OffsetQuery(StrictSerializer):
    """Where a log is to begin."""

    offset = serializers.IntegerField(required=False, default=0, min_value=0, max_value=2**53)


class ImageBuildViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[ImageBuild]
):
    """Image builds on all nodes."""

    queryset = ImageBuild.objects.select_related("image", "node", "requested_by").defer("log")
    serializer_class = ImageBuildOutput
    filterset_class = ImageBuildFilter
    required_scope = "operate"
    read_scope = "operate"
    lookup_value_converter = "uuid"

    @extend_schema(
        responses=ImageBuildDetail,
        parameters=[
            OpenApiParameter("offset", OpenApiTypes.INT, description="Character to begin with.")
        ],
    )
    def retrieve(self, request: Request, **kwargs: Any) -> Response:
        """Return a build with its log from an offset on."""
        query = OffsetQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        self.filter_backends = []  # the offset is none of the list's filters
        self.queryset = ImageBuild.objects.select_related("image", "node", "requested_by")
        detail = ImageBuildDetail(self.get_object(), context=dict(query.validated_data))
        return Response(detail.data)

    @extend_schema(request=None, responses={202: ImageBuildOutput})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """Cancel a build; one that is over stays as it is."""
        cancel_build(build_id=self.get_object().pk)
        return Response(ImageBuildOutput(self.get_object()).data, status=status.HTTP_202_ACCEPTED)


class ImageBuildsMixin:
    """The builds of one image, for the viewset of images."""

    @extend_schema(responses=ImageBuildOutput(many=True), filters=False)
    @action(detail=True, read_scope="operate")
    def builds(self: Any, request: Request, **kwargs: Any) -> Response:
        """Return the image's builds on all nodes, newest first."""
        found = ImageBuildViewSet.queryset.filter(image=self.get_object())
        page = self.paginate_queryset(found)
        response: Response = self.get_paginated_response(ImageBuildOutput(page, many=True).data)
        return response

    @extend_schema(request=ImageBuildInput, responses={202: ImageBuildOutput(many=True)})
    @builds.mapping.post
    def request_builds(self: Any, request: Request, **kwargs: Any) -> Response:
        """Pull, build or unpack the image on nodes, or check it there; a running one is joined."""
        image = self.get_object()
        given = ImageBuildInput(data=request.data)
        given.is_valid(raise_exception=True)
        made = request_builds(image=image, requested_by=request.user, **given.validated_data)
        found = ImageBuildViewSet.queryset.filter(pk__in=[build.pk for build in made])
        return Response(
            ImageBuildOutput(found.order_by("node__name"), many=True).data,
            status=status.HTTP_202_ACCEPTED,
        )
