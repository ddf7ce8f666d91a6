"""What operators' calls read and answer."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

from django.core.validators import RegexValidator
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from sandboxes.api.strict import INTEGER_MAX, JsonObjectField, StrictSerializer
from sandboxes.images.specs import MAX_DEFINITION_BYTES
from sandboxes.limits import limit_errors
from sandboxes.models import Environment, Image, Node, Sandbox, Snapshot, validate_name
from sandboxes.network.allow_list import InvalidPattern, parse_pattern
from sandboxes.setup_files import decoded_size
from sandboxes.states import Gpu, ImageReuse, Network, PromptFormat

validate_absolute = RegexValidator(r"^/", "Must be an absolute path.")


class ImageInput(StrictSerializer):
    """A root file system to register."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    source = serializers.CharField(  # type: ignore[assignment]
        max_length=500,
        help_text="A path (SIF file, unpacked image or root file system), absolute or relative to "
        "the node's image root; docker://, oras:// or library:// and a reference; definition: or "
        "template: for the text given; template:NAME for a shipped one.",
    )
    definition = serializers.CharField(
        required=False,
        allow_blank=True,
        trim_whitespace=False,
        max_length=MAX_DEFINITION_BYTES,
        help_text="Definition file, or a Jinja2 template of one.",
    )
    files = JsonObjectField(
        required=False, help_text="Laid beside the definition for %files: path to text."
    )
    parameters = JsonObjectField(required=False, help_text="Values for the template.")
    reuse = serializers.ChoiceField(choices=ImageReuse.choices, required=False)
    lock = serializers.CharField(required=False, allow_blank=True, max_length=200)


class ImageOutput(serializers.ModelSerializer[Image]):
    """An image."""

    class Meta:
        model = Image
        fields = [
            "id",
            "name",
            "source",
            "reuse",
            "lock",
            "state",
            "detail",
            "digest",
            "checked_at",
            "created_at",
        ]


class ImageDetail(ImageOutput):
    """An image with all that it is made from."""

    class Meta(ImageOutput.Meta):
        fields = [*ImageOutput.Meta.fields, "definition", "files", "parameters"]


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


EnvironmentRule = Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]]
"""Yields the field and the reason of what is wrong with an environment's given values."""


class EnvironmentInput(StrictSerializer):
    """Values of an environment's next version."""

    name = serializers.CharField(max_length=99, validators=[validate_name])
    description = serializers.CharField(required=False, allow_blank=True)
    image = ImageReferenceField(
        required=False, allow_null=True, help_text="Name or id; null: no sandbox is needed."
    )
    setup = serializers.CharField(required=False, allow_blank=True, trim_whitespace=False)
    files = JsonObjectField(
        required=False,
        help_text="Put under /setup for every setup: path to `base64` and `mode`.",
    )
    workdir = serializers.CharField(required=False, max_length=200, validators=[validate_absolute])
    agent = serializers.CharField(required=False, max_length=99)
    agent_settings = JsonObjectField(required=False)
    system_prompt = serializers.CharField(required=False, allow_blank=True, trim_whitespace=False)
    prompt_format = serializers.ChoiceField(
        choices=PromptFormat.choices,
        required=False,
        help_text="How the system prompt, `instruction_template`, demonstrations and tool "
        "descriptions are read.",
    )
    tools = serializers.ListField(
        child=serializers.CharField(max_length=200),
        required=False,
        max_length=100,
        help_text="Names; `mcp:<server>` or `mcp:<server>/<tool>` for an MCP server's.",
    )
    tool_settings = JsonObjectField(
        required=False,
        help_text="By tool: its settings, and a `description` in place of its own.",
    )
    network = serializers.ChoiceField(choices=Network.choices, required=False)
    egress_hosts = serializers.ListField(
        child=serializers.CharField(max_length=300),
        required=False,
        max_length=200,
        help_text="For `allow_list`: names, `*.` names or addresses, each with a port or not.",
    )
    gpu = serializers.ChoiceField(choices=Gpu.choices, required=False, allow_blank=True)
    warm = serializers.IntegerField(
        required=False,
        min_value=0,
        max_value=256,
        help_text="Sandboxes that each node keeps started ahead.",
    )
    limits = JsonObjectField(required=False)
    evaluator = serializers.CharField(required=False, max_length=99)
    evaluator_settings = JsonObjectField(required=False)
    secrets = JsonObjectField(
        required=False,
        help_text="By reference, never the value: name to `from` (`env:NAME` or `file:PATH` of "
        "the worker) and `to` (some of `setup`, `tools`, `evaluator`).",
    )

    def validate_limits(self, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse limits that no node could keep."""
        wrong = list(limit_errors(value))
        if wrong:
            raise serializers.ValidationError(wrong)
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse hosts that the network would not let through: nobody means that."""
        if attrs.get("egress_hosts") and attrs.get("network") != Network.ALLOW_LIST:
            raise serializers.ValidationError(
                {"egress_hosts": "Hosts are listed and the network is another one."}
            )
        wrong: dict[str, list[str]] = {}
        for rule in self.context.get("rules", ()):
            for field, reason in rule(attrs):
                wrong.setdefault(field, []).append(reason)
        if wrong:
            raise serializers.ValidationError(wrong)
        return attrs

    def validate_agent(self, value: str) -> str:
        """Refuse an agent that no handler has the name of."""
        return self._known("agents", value)

    def validate_evaluator(self, value: str) -> str:
        """Refuse an evaluator that is not registered."""
        return self._known("evaluators", value)

    def validate_egress_hosts(self, value: list[str]) -> list[str]:
        """Refuse what is no host."""
        for host in value:
            try:
                parse_pattern(host)
            except InvalidPattern as fault:
                raise serializers.ValidationError(f"{fault}.") from None
        return value

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
    files = serializers.SerializerMethodField(help_text="By path: bytes and mode; export has all.")

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
            "files",
            "workdir",
            "agent",
            "agent_settings",
            "system_prompt",
            "prompt_format",
            "tools",
            "tool_settings",
            "network",
            "egress_hosts",
            "gpu",
            "warm",
            "limits",
            "evaluator",
            "evaluator_settings",
            "secrets",
            "verification",
            "verified_at",
            "created_at",
        ]
        read_only_fields = fields

    @extend_schema_field(OpenApiTypes.OBJECT)
    def get_files(self, environment: Environment) -> dict[str, dict[str, int]]:
        """Return how large each file is: all of them would make lists heavy."""
        return {
            path: {"bytes": decoded_size(entry["base64"]), "mode": entry["mode"]}
            for path, entry in environment.files.items()
        }


class NodeInput(StrictSerializer):
    """What an operator changes about a node."""

    draining = serializers.BooleanField(required=False)
    capacity = serializers.IntegerField(required=False, min_value=0, max_value=INTEGER_MAX)


class NodeOutput(serializers.ModelSerializer[Node]):
    """A node and how many of its slots are in use."""

    slots_used = serializers.IntegerField(read_only=True)
    enforcement = JsonObjectField(read_only=True, help_text="How each limit is kept here.")

    class Meta:
        model = Node
        fields = [
            *("id", "name", "capacity", "slots_used", "draining"),
            *("enforcement", "leaked", "seen_at", "created_at"),
        ]


class SandboxOutput(serializers.ModelSerializer[Sandbox]):
    """A sandbox."""

    layers = serializers.ListField(child=serializers.CharField(), read_only=True)
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
            "layers",
            "created_at",
            "ready_at",
            "gone_at",
        ]


class SnapshotInput(StrictSerializer):
    """When a rollout's sandbox is to be kept."""

    turn = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=INTEGER_MAX,
        help_text="After so many turns; default: after the next one.",
    )


class SnapshotOutput(serializers.ModelSerializer[Snapshot]):
    """The state of a sandbox after a turn."""

    rollout = serializers.UUIDField(source="owner", read_only=True)
    environment = serializers.CharField(source="environment.ref", read_only=True)
    node = serializers.SlugRelatedField[Node](slug_field="name", read_only=True)

    class Meta:
        model = Snapshot
        fields = [
            *("id", "rollout", "environment", "turn", "state", "node", "workdir"),
            *("detail", "created_at", "ready_at"),
        ]
