"""Snapshots: ask for one, list, look at, delete."""

from typing import Any
from uuid import UUID

from django.db.models import OuterRef
from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status, viewsets
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.idempotent import idempotent
from rollouts.exceptions import StateConflict
from rollouts.models import Rollout
from rollouts.services.snapshots import ask_for_snapshot, delete_snapshot
from sandboxes.api.serializers import SnapshotInput, SnapshotOutput
from sandboxes.models import Snapshot

_SNAPSHOTS = Snapshot.objects.select_related("environment", "node")


def _visible(request: Request) -> Any:
    """Return the snapshots of the rollouts that the caller may see."""
    rollouts = Rollout.objects.visible_to(request.user, request.auth)
    return _SNAPSHOTS.filter(owner__in=rollouts.filter(pk=OuterRef("owner")).values("pk"))


class RolloutSnapshotViewSet(viewsets.GenericViewSet[Snapshot]):
    """Snapshots of one rollout's sandbox."""

    queryset = _SNAPSHOTS
    serializer_class = SnapshotOutput
    pagination_class = None
    filter_backends = ()

    @extend_schema(responses=SnapshotOutput(many=True))
    def list(self, request: Request, rollout_id: UUID) -> Response:
        """Return the rollout's snapshots, newest first."""
        rollout = self._rollout(request, rollout_id)
        found = _SNAPSHOTS.filter(owner=rollout.pk)
        return Response(SnapshotOutput(found, many=True).data)

    @extend_schema(request=SnapshotInput, responses={202: SnapshotOutput})
    @idempotent()
    def create(self, request: Request, rollout_id: UUID) -> Response:
        """Ask for the sandbox's state after a turn; 409 when that can no longer come."""
        given = SnapshotInput(data=request.data)
        given.is_valid(raise_exception=True)
        rollout = self._rollout(request, rollout_id)
        snapshot = ask_for_snapshot(rollout=rollout, **given.validated_data)
        return Response(SnapshotOutput(snapshot).data, status=status.HTTP_202_ACCEPTED)

    @staticmethod
    def _rollout(request: Request, rollout_id: UUID) -> Rollout:
        found = Rollout.objects.visible_to(request.user, request.auth).select_related("environment")
        rollout = found.filter(pk=rollout_id).first()
        if rollout is None:
            raise Http404
        return rollout


class SnapshotViewSet(mixins.RetrieveModelMixin, viewsets.GenericViewSet[Snapshot]):
    """Kept states of sandboxes; groups start from them."""

    queryset = _SNAPSHOTS
    serializer_class = SnapshotOutput
    lookup_value_converter = "uuid"

    def get_queryset(self) -> Any:
        """Return the visible snapshots."""
        if getattr(self, "swagger_fake_view", False):
            return _SNAPSHOTS.none()
        return _visible(self.request)

    @extend_schema(request=None, responses={204: None})
    def destroy(self, request: Request, **kwargs: Any) -> Response:
        """Delete a snapshot; 409 while an unfinished group starts from it."""
        if not delete_snapshot(snapshot_id=self.get_object().pk):
            raise StateConflict(
                "An unfinished group starts from this snapshot.", code="snapshot.in_use"
            )
        return Response(status=status.HTTP_204_NO_CONTENT)
