"""What operators' calls read and answer."""

from typing import Any
from uuid import UUID

from django.core.validators import RegexValidator
from rest_framework import serializers

from sandboxes.api.strict import INTEGER_MAX, JsonObjectField, StrictSerializer
from sandboxes.models import Environment, Image, Node, Sandbox, validate_name
from sandboxes.states import Network

validate_absolute = RegexValidator(r"^/", "Must be an absolute path.")


class ImageInput(StrictSerializer):
    """A root file system to register."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    source = serializers.CharField(  # type: ignore[assignment]
        max_length=500, help_text="Folder or SIF file: absolute, or relative to the image root."
    )


class ImageOutput(serializers.ModelSerializer[Image]):
    """An image."""

    class Meta:
        model = Image
        fields = ["id", "name", "source", "state", "detail", "created_at"]


class ImageReferenceField(serializers.CharField):
    """An image by its name or id."""

    default_error_messages = {"unknown": "There is no image {value!r}."}

    def to_internal_value(self, data: Any) -> Any:
        """Return the image. Raises ValidationError."""
        value = super().to_internal_value(data)
        try:
            found = Image.objects.filter(pk=UUID(value)).first()
        except ValueError:
            found = Image.objects.filter(name=value).first()
        if found is None:
            self.fail("unknown", value=value)
        return found


class EnvironmentInput(StrictSerializer):
    """Values of an environment's next version."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    description = serializers.CharField(required=False, allow_blank=True)
    image = ImageReferenceField(
        required=False, allow_null=True, help_text="Name or id; null: no sandbox is needed."
    )
    setup = serializers.CharField(required=False, allow_blank=True, trim_whitespace=False)
    workdir = serializers.CharField(required=False, max_length=200, validators=[validate_absolute])
    agent = serializers.CharField(required=False, max_length=99)
    agent_settings = JsonObjectField(required=False)
    system_prompt = serializers.CharField(required=False, allow_blank=True, trim_whitespace=False)
    tools = serializers.ListField(
        child=serializers.CharField(max_length=99), required=False, max_length=100
    )
    network = serializers.ChoiceField(choices=Network.choices, required=False)
    limits = JsonObjectField(required=False)
    evaluator = serializers.CharField(required=False, max_length=99)
    evaluator_settings = JsonObjectField(required=False)

    def validate_agent(self, value: str) -> str:
        """Refuse an agent that no handler has the name of."""
        return self._known("agents", value)

    def validate_evaluator(self, value: str) -> str:
        """Refuse an evaluator that is not registered."""
        return self._known("evaluators", value)

    def validate_tools(self, value: list[str]) -> list[str]:
        """Refuse tools that are not registered."""
        return [self._known("tools", name) for name in value]

    def _known(self, registry: str, name: str) -> str:
        known = self.context.get("registries", {}).get(registry)
        if known is not None and name not in known:
            raise serializers.ValidationError(
                f"Unknown name {name!r}; known: {', '.join(sorted(known))}."
            )
        return name


class EnvironmentOutput(serializers.ModelSerializer[Environment]):
    """One version of an environment."""

    image = serializers.SlugRelatedField[Image](slug_field="name", read_only=True)
    ref = serializers.CharField(read_only=True)

    class Meta:
        model = Environment
        fields = [
            "id",
            "ref",
            "name",
            "version",
            "description",
            "image",
            "setup",
            "workdir",
            "agent",
            "agent_settings",
            "system_prompt",
            "tools",
            "network",
            "limits",
            "evaluator",
            "evaluator_settings",
            "created_at",
        ]
        read_only_fields = fields


class NodeInput(StrictSerializer):
    """What an operator changes about a node."""

    draining = serializers.BooleanField(required=False)
    capacity = serializers.IntegerField(required=False, min_value=0, max_value=INTEGER_MAX)


class NodeOutput(serializers.ModelSerializer[Node]):
    """A node and how many of its slots are in use."""

    slots_used = serializers.IntegerField(read_only=True)

    class Meta:
        model = Node
        fields = ["id", "name", "capacity", "slots_used", "draining", "seen_at", "created_at"]


class SandboxOutput(serializers.ModelSerializer[Sandbox]):
    """A sandbox."""

    node = serializers.SlugRelatedField[Node](slug_field="name", read_only=True)
    rollout = serializers.UUIDField(source="owner", read_only=True)

    class Meta:
        model = Sandbox
        fields = [
            "id",
            "rollout",
            "node",
            "purpose",
            "state",
            "created_at",
            "ready_at",
            "gone_at",
        ]
