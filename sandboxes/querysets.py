"""Queries on environments, nodes and sandboxes."""

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from django.db import models
from django.db.models import Count, IntegerField, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce, Now

from sandboxes.states import (
    IMAGE_BUILD_ACTIVE,
    ImageBuildState,
    SandboxState,
    SnapshotState,
)

if TYPE_CHECKING:
    from sandboxes.models import (  # noqa: F401
        Environment,
        ImageBuild,
        Node,
        Sandbox,
        Snapshot,
    )


class EnvironmentQuerySet(models.QuerySet["Environment"]):
    """Adjectives of environments."""

    def latest_versions(self) -> "EnvironmentQuerySet":
        """Keep the newest version of each name."""
        newest = self.model.objects.filter(name=OuterRef("name")).order_by("-version")
        return self.filter(id=Subquery(newest.values("id")[:1]))

    def named(self, name: str, version: int | None) -> "EnvironmentQuerySet":
        """Keep one name: the given version, or the newest."""
        found = self.filter(name=name)
        return found.filter(version=version) if version else found.order_by("-version")[:1]


class NodeQuerySet(models.QuerySet["Node"]):
    """Adjectives of nodes."""

    def with_slots_used(self) -> "NodeQuerySet":
        """Annotate `slots_used`: owners with a sandbox that is not gone."""
        from sandboxes.models import Sandbox

        used = (
            Sandbox.objects.present()
            .filter(node=OuterRef("pk"))
            .values("node")
            .annotate(owners=Count("owner", distinct=True))
            .values("owners")
        )
        return self.annotate(slots_used=Coalesce(Subquery(used, output_field=IntegerField()), 0))


class SandboxQuerySet(models.QuerySet["Sandbox"]):
    """Adjectives of sandboxes."""

    def present(self) -> "SandboxQuerySet":
        """Keep what still holds a slot."""
        return self.filter(~Q(state=SandboxState.GONE))

    def usable(self) -> "SandboxQuerySet":
        """Keep what was neither given up nor is gone."""
        return self.filter(~Q(state__in=[SandboxState.STOPPING, SandboxState.GONE]))

    def of(self, owner: UUID) -> "SandboxQuerySet":
        """Keep the sandboxes of one owner."""
        return self.filter(owner=owner)


class SnapshotQuerySet(models.QuerySet["Snapshot"]):
    """Adjectives of snapshots."""

    def ready(self) -> "SnapshotQuerySet":
        """Keep what rollouts can start from."""
        return self.filter(state=SnapshotState.READY)

    def due(self, owner: UUID, turn: int) -> "SnapshotQuerySet":
        """Keep what is to be taken from an owner's sandbox after that turn."""
        return self.filter(
            Q(turn__isnull=True) | Q(turn=turn), owner=owner, state=SnapshotState.REQUESTED
        )


class ImageBuildQuerySet(models.QuerySet["ImageBuild"]):
    """Adjectives of image builds."""

    def active(self) -> "ImageBuildQuerySet":
        """Keep what is queued or running."""
        return self.filter(state__in=IMAGE_BUILD_ACTIVE)

    def silent(self, seconds: float) -> "ImageBuildQuerySet":
        """Keep what runs by its row and has not been heard of, by the database's clock."""
        limit = Now() - timedelta(seconds=seconds)
        return self.filter(state=ImageBuildState.RUNNING, heartbeat_at__lt=limit)

    def waiting(self, seconds: float) -> "ImageBuildQuerySet":
        """Keep what is queued and was last published longer ago, by the database's clock."""
        limit = Now() - timedelta(seconds=seconds)
        return self.filter(
            Q(published_at__isnull=True) | Q(published_at__lt=limit), state=ImageBuildState.QUEUED
        )
