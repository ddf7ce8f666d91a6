"""Groups: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.serializers.experiments import PRIORITY_LIMIT
from rollouts.api.serializers.rollouts import TrajectorySchema
from rollouts.handlers.conversation import (
    MAX_MESSAGES,
    InvalidConversation,
    check_conversation,
)
from rollouts.models import Group
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.services.inline import InlineTask
from rollouts.services.submit import MAX_GROUPS_PER_CALL
from sandboxes.api.strict import JsonObjectField, StrictSerializer


class InlineTaskInput(StrictSerializer):
    """A task sent along with its group."""

    environment = serializers.CharField(max_length=120, help_text="`name` or `name@version`.")
    instruction = serializers.CharField(trim_whitespace=False)
    payload = JsonObjectField(required=False)
    hidden = JsonObjectField(required=False, help_text="For the evaluator only.")
    metadata = JsonObjectField(required=False)
    messages = serializers.ListField(
        child=JsonObjectField(),
        required=False,
        max_length=MAX_MESSAGES,
        help_text="The conversation that an agent such as `branch` goes on from: OpenAI's "
        "messages, the last one the user's or a tool's.",
    )

    def validate_payload(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Refuse a conversation that nobody checked."""
        if "messages" in payload:
            raise serializers.ValidationError("Send messages beside payload, not in it.")
        return payload

    def validate_messages(self, messages: list[Any]) -> list[dict[str, Any]]:
        """Return the conversation as it is stored."""
        try:
            return check_conversation(messages)
        except InvalidConversation as error:
            raise serializers.ValidationError(f"{error}.") from None

    def validate(self, attrs: dict[str, Any]) -> Any:
        """Return the task."""
        return InlineTask(**attrs)


class GroupInput(StrictSerializer):
    """One task to be sampled: exactly one of `task`, `task_ref` and `inline`."""

    task = serializers.UUIDField(required=False)
    task_ref = serializers.CharField(required=False, max_length=200)
    inline = InlineTaskInput(required=False)
    samples = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_SAMPLES,
        help_text="Rollouts of the group; default: the experiment's group_size.",
    )
    priority = serializers.IntegerField(
        required=False, min_value=-PRIORITY_LIMIT, max_value=PRIORITY_LIMIT
    )
    metadata = JsonObjectField(required=False)
    snapshot = serializers.UUIDField(
        required=False, help_text="Start from this state of another rollout's sandbox."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse none or several of the ways to name a task."""
        given = [name for name in ("task", "task_ref", "inline") if name in attrs]
        if len(given) != 1:
            raise serializers.ValidationError("Give exactly one of task, task_ref and inline.")
        return attrs


class GroupsInput(StrictSerializer):
    """Groups to submit, all or none of them."""

    groups = GroupInput(  # type: ignore[call-arg]
        many=True, allow_empty=False, max_length=MAX_GROUPS_PER_CALL
    )


class SubmittedGroup(serializers.Serializer[Any]):
    """A group that was accepted."""

    id = serializers.UUIDField()
    task = serializers.UUIDField(source="task_id")
    samples = serializers.IntegerField(source="size")
    rollouts = serializers.SerializerMethodField()

    def get_rollouts(self, group: Group) -> list[str]:
        """Return the ids of the group's rollouts by sample, as the view fetched them."""
        ids: list[str] = self.context["rollouts"].get(group.pk, [])
        return ids


class SubmittedGroups(serializers.Serializer[Any]):
    """The groups that were accepted, in the order of the request."""

    groups = SubmittedGroup(many=True)


class GroupOutput(serializers.ModelSerializer[Group]):
    """A group."""

    task_ref = serializers.CharField(source="task.ref", read_only=True)
    environment = serializers.CharField(source="environment.ref", read_only=True)
    samples = serializers.IntegerField(source="size", read_only=True)
    done = serializers.IntegerField(source="done_count", read_only=True)
    metadata = JsonObjectField(read_only=True)

    class Meta:
        model = Group
        fields = [
            "id",
            "experiment",
            "task",
            "task_ref",
            "environment",
            "state",
            "samples",
            "done",
            "priority",
            "metadata",
            "snapshot",
            "batch",
            "filter_rule",
            "filter_detail",
            "replacements",
            "oldest_version",
            "newest_version",
            "epoch",
            "position",
            "created_at",
            "started_at",
            "deadline_at",
            "ready_at",
        ]
        read_only_fields = fields


class GroupCounts(serializers.Serializer[Any]):
    """How many groups of an experiment are in each state, and how many each rule filtered."""

    states = serializers.DictField(child=serializers.IntegerField())
    rules = serializers.DictField(child=serializers.IntegerField())


class GroupContent(GroupOutput):
    """A group with the trajectories of its finished rollouts, by sample."""

    trajectories = TrajectorySchema(many=True)

    class Meta(GroupOutput.Meta):
        fields = [*GroupOutput.Meta.fields, "trajectories"]
        read_only_fields = fields


class GroupDetail(GroupOutput):
    """A group with the ids of its rollouts, by sample."""

    rollouts = serializers.SerializerMethodField()

    class Meta(GroupOutput.Meta):
        fields = [*GroupOutput.Meta.fields, "rollouts"]

    def get_rollouts(self, group: Group) -> list[str]:
        """Return the ids of the rollouts, as the view fetched them."""
        ids: list[str] = self.context["rollouts"].get(group.pk, [])
        return ids
