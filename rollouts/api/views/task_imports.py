"""Imports of tasks over HTTP: begin, follow, see what was refused, cancel."""

from collections.abc import Iterator
from io import BytesIO
from types import SimpleNamespace
from typing import IO, Any

from django.conf import settings
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.decorators import action
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings

from rollouts.api.filters import TaskImportFilter
from rollouts.api.serializers.task_imports import (
    ImportInput,
    RejectedRowOutput,
    TaskImportOutput,
    UploadQuery,
)
from rollouts.exceptions import InvalidValue
from rollouts.models import RejectedRow, TaskImport
from rollouts.services.task_imports import begin_path, begin_upload, cancel_import

CHUNK_BYTES = 1024 * 1024


class Upload:
    """The body of a call, unread."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def chunks(self) -> Iterator[bytes]:
        """Yield the body piece by piece."""
        while chunk := self._stream.read(CHUNK_BYTES):
            yield chunk


class UploadParser(BaseParser):
    """Take a body as it comes."""

    media_type = "application/octet-stream"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the unread body."""
        return Upload(stream)


class OwnFormat(DefaultContentNegotiation):
    """Leave the parameter `format` to the call: it says what is imported, not what is answered."""

    settings: Any = SimpleNamespace(URL_FORMAT_OVERRIDE=None)


class TaskImportViewSet(
    mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[TaskImport]
):
    """Imports of tasks into task sets, as jobs."""

    queryset = TaskImport.objects.select_related("environment", "requested_by")
    serializer_class = TaskImportOutput
    filterset_class = TaskImportFilter
    required_scope = "operate"
    read_scope = "operate"
    lookup_value_converter = "uuid"
    content_negotiation_class = OwnFormat
    parser_classes: Any = [*api_settings.DEFAULT_PARSER_CLASSES, UploadParser]

    @extend_schema(
        request={"application/json": ImportInput, "application/octet-stream": OpenApiTypes.BINARY},
        responses={202: TaskImportOutput},
        parameters=[
            OpenApiParameter(name, OpenApiTypes.STR, description=f"Of an upload: {what}.")
            for name, what in (
                ("set_name", "the task set"),
                ("name", "the file's name"),
                ("format", "left out, told by the content"),
                ("environment", "for all tasks"),
                ("options", "a JSON object"),
                ("description", "of a task set that is new"),
            )
        ],
    )
    def create(self, request: Request) -> Response:
        """Import what is sent (a file, or a zip or tar of folders), or what lies at a path."""
        if request.content_type == UploadParser.media_type:
            job = self._uploaded(request)
        else:
            given = ImportInput(data=request.data)
            given.is_valid(raise_exception=True)
            job = begin_path(requested_by=request.user, **given.validated_data)
        return Response(TaskImportOutput(job).data, status=status.HTTP_202_ACCEPTED)

    @staticmethod
    def _uploaded(request: Request) -> TaskImport:
        query = UploadQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        length = str(request.META.get("CONTENT_LENGTH") or "")
        limit = settings.IMPORT_MAX_BYTES
        if length.isdecimal() and int(length) > limit:
            raise InvalidValue(
                f"The upload has more than {limit} bytes: split it, or have the operator put it "
                "below one of PRORL_IMPORT_ROOTS.",
                code="import.too_large",
            )
        values = {"name": "upload", **query.validated_data}
        upload = request.data if isinstance(request.data, Upload) else Upload(BytesIO())
        return begin_upload(chunks=upload.chunks(), requested_by=request.user, **values)

    @extend_schema(responses=RejectedRowOutput(many=True), filters=False)
    @action(detail=True)
    def rejected(self, request: Request, **kwargs: Any) -> Response:
        """Return the rows that were refused, with the reasons; the first thousand are kept."""
        found = RejectedRow.objects.filter(task_import=self.get_object())
        self.paginator.ordering = ("number",)  # type: ignore[union-attr]
        page: Any = self.paginate_queryset(found)  # type: ignore[arg-type]
        return self.get_paginated_response(RejectedRowOutput(page, many=True).data)

    @extend_schema(request=None, responses={202: TaskImportOutput})
    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, **kwargs: Any) -> Response:
        """Cancel an import; what it imported stays, and one that is over stays as it is."""
        cancel_import(import_id=self.get_object().pk)
        return Response(TaskImportOutput(self.get_object()).data, status=status.HTTP_202_ACCEPTED)
