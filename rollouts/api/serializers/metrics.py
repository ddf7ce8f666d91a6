"""An experiment's numbers, as they are answered."""

from typing import Any

from rest_framework import serializers

_Serializer = serializers.Serializer[Any]


class RolloutTotals(_Serializer):
    """All rollouts of the experiment."""

    total = serializers.IntegerField()
    by_state = serializers.DictField(child=serializers.IntegerField())
    by_outcome = serializers.DictField(child=serializers.IntegerField())
    replaced = serializers.IntegerField(help_text="Failed samples that others took the place of.")


class GroupTotals(_Serializer):
    """All groups of the experiment."""

    total = serializers.IntegerField()
    by_state = serializers.DictField(child=serializers.IntegerField())
    filtered_by_rule = serializers.DictField(child=serializers.IntegerField())
    filter_rate = serializers.FloatField(
        allow_null=True,
        help_text="Filtered groups of those that are ready, leased, consumed, or so.",
    )


class TokenTotals(_Serializer):
    """Tokens: sampled ones of all rollouts, the others of the newest groups."""

    sampled = serializers.IntegerField()
    window_prompt = serializers.IntegerField()
    window_response = serializers.IntegerField()


class WindowOutput(_Serializer):
    """The newest groups, of which rewards, stages and throughput are."""

    groups = serializers.IntegerField()
    rollouts = serializers.IntegerField(help_text="Those that are done.")
    scored = serializers.IntegerField()


class VersionRewardOutput(_Serializer):
    """Rewards of the samples that a policy version began."""

    policy_version = serializers.IntegerField(allow_null=True)
    count = serializers.IntegerField()
    mean = serializers.FloatField()
    std = serializers.FloatField()


class StageTimeOutput(_Serializer):
    """Seconds in a stage, a queue or an activity."""

    name = serializers.CharField()
    count = serializers.IntegerField()
    p50 = serializers.FloatField()
    p95 = serializers.FloatField()


class ThroughputOutput(_Serializer):
    """What was done in the last minutes."""

    minutes = serializers.FloatField()
    rollouts = serializers.IntegerField()
    rollouts_per_minute = serializers.FloatField()
    sampled_tokens_per_second = serializers.FloatField()


class PolicyLagOutput(_Serializer):
    """Policy lag of the groups of the last batches."""

    batches = serializers.IntegerField()
    groups = serializers.IntegerField()
    mean = serializers.FloatField(allow_null=True)
    max = serializers.IntegerField(allow_null=True)


class InferenceOutput(_Serializer):
    """What the policy's servers have in flight."""

    servers = serializers.IntegerField()
    slots = serializers.IntegerField()
    requests = serializers.IntegerField()
    tokens = serializers.IntegerField()
    utilisation = serializers.FloatField(allow_null=True)


class MetricsOutput(_Serializer):
    """An experiment in numbers."""

    experiment = serializers.UUIDField()
    at = serializers.DateTimeField()
    policy_version = serializers.IntegerField()
    rollouts = RolloutTotals()
    groups = GroupTotals()
    tokens = TokenTotals()
    window = WindowOutput()
    rewards = VersionRewardOutput(many=True)
    stages = StageTimeOutput(many=True)
    throughput = ThroughputOutput()
    policy_lag = PolicyLagOutput()
    inference = InferenceOutput(allow_null=True)
