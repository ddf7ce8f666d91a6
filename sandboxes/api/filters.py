"""Filters of operators' lists."""

from typing import Any

from django_filters import rest_framework as filters

from sandboxes.models import Environment, ImageBuild, Node, Sandbox
from sandboxes.states import ImageBuildState, SandboxPurpose, SandboxState, Verified


class EnvironmentFilter(filters.FilterSet):
    """Environments by name and version, or only the newest versions."""

    name = filters.CharFilter()
    version = filters.NumberFilter()
    verification = filters.MultipleChoiceFilter(choices=Verified.choices)
    latest = filters.BooleanFilter(method="keep_latest", label="Newest version of each name.")

    class Meta:
        model = Environment
        fields: list[str] = []

    def keep_latest(self, queryset: Any, name: str, value: bool) -> Any:
        """Keep the newest version of each name."""
        return queryset.latest_versions() if value else queryset


class NodeFilter(filters.FilterSet):
    """Nodes by name and whether they drain."""

    name = filters.CharFilter()
    draining = filters.BooleanFilter()

    class Meta:
        model = Node
        fields: list[str] = []


class ImageBuildFilter(filters.FilterSet):
    """Image builds by image, node and state."""

    image = filters.CharFilter(field_name="image__name")
    node = filters.CharFilter(field_name="node__name")
    state = filters.MultipleChoiceFilter(choices=ImageBuildState.choices)

    class Meta:
        model = ImageBuild
        fields: list[str] = []


class SandboxFilter(filters.FilterSet):
    """Sandboxes by rollout, node, state and purpose."""

    rollout = filters.UUIDFilter(field_name="owner")
    node = filters.CharFilter(field_name="node__name")
    state = filters.MultipleChoiceFilter(choices=SandboxState.choices)
    purpose = filters.ChoiceFilter(choices=SandboxPurpose.choices)

    class Meta:
        model = Sandbox
        fields: list[str] = []
