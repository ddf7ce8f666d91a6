"""Queries on environments, nodes and sandboxes."""

from typing import TYPE_CHECKING
from uuid import UUID

from django.db import models
from django.db.models import Count, IntegerField, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from sandboxes.states import SandboxState

if TYPE_CHECKING:
    from sandboxes.models import Environment, Node, Sandbox  # noqa: F401


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
