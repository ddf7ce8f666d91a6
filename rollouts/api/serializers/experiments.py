"""Experiments: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.fields import OptionsField, PolicyField, TaskSetsField
from rollouts.exceptions import RolloutError
from rollouts.models import Experiment, Policy
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.options import Budgets, Sampling
from rollouts.states import LagAction
from sandboxes.api.strict import INTEGER_MAX, StrictSerializer

PRIORITY_LIMIT = 1_000_000


class FeedNotSupported(RolloutError):
    """The service cannot feed an experiment in this way."""

    code = "feed.not_supported"


class ExperimentChanges(StrictSerializer):
    """What can be changed of an experiment; it holds for rollouts not yet started."""

    name = serializers.CharField(max_length=200)
    task_sets = TaskSetsField(required=False, max_length=1000, help_text="Names or ids.")
    group_size = serializers.IntegerField(required=False, min_value=1, max_value=MAX_SAMPLES)
    sampling = OptionsField(Sampling, required=False)
    budgets = OptionsField(Budgets, required=False)
    priority = serializers.IntegerField(
        required=False, min_value=-PRIORITY_LIMIT, max_value=PRIORITY_LIMIT
    )
    share = serializers.IntegerField(required=False, min_value=1, max_value=1000)
    max_attempts = serializers.IntegerField(required=False, min_value=1, max_value=20)
    failure_reward = serializers.FloatField(required=False)
    max_policy_lag = serializers.IntegerField(
        required=False,
        allow_null=True,
        min_value=0,
        max_value=INTEGER_MAX,
        help_text="Newest minus oldest policy version of one rollout's tokens; null: any.",
    )
    on_policy_lag = serializers.ChoiceField(
        choices=LagAction.values,
        required=False,
        help_text="What becomes of a rollout that would go beyond it: `cut` ends and scores it, "
        "`drop` cancels it, `keep` lets it go on.",
    )


class ExperimentInput(ExperimentChanges):
    """A new experiment."""

    policy = PolicyField(help_text="Name or id.")
    feed = serializers.ChoiceField(
        choices=["push", "pull"],
        required=False,
        help_text="Only `push` is served: groups are what the trainer posts.",
    )

    def validate_feed(self, value: str) -> str:
        """Refuse feeds that are not served. Raises FeedNotSupported."""
        if value != "push":
            raise FeedNotSupported(
                "This service feeds experiments by push only: post groups to the experiment."
            )
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the values that the service takes."""
        attrs.pop("feed", None)
        return attrs


class ExperimentOutput(serializers.ModelSerializer[Experiment]):
    """An experiment."""

    owner = serializers.SlugRelatedField[Any](slug_field="username", read_only=True)
    policy = serializers.SlugRelatedField[Policy](slug_field="name", read_only=True)
    policy_id = serializers.UUIDField(read_only=True)
    policy_version = serializers.IntegerField(source="policy.version", read_only=True)
    task_sets = serializers.SlugRelatedField[Any](slug_field="name", many=True, read_only=True)
    feed = serializers.SerializerMethodField()
    sampling = OptionsField(Sampling, read_only=True)
    budgets = OptionsField(Budgets, read_only=True)

    class Meta:
        model = Experiment
        fields = [
            "id",
            "name",
            "owner",
            "policy",
            "policy_id",
            "policy_version",
            "task_sets",
            "feed",
            "state",
            "group_size",
            "sampling",
            "budgets",
            "priority",
            "share",
            "max_attempts",
            "failure_reward",
            "max_policy_lag",
            "on_policy_lag",
            "created_at",
        ]

    def get_feed(self, experiment: Experiment) -> str:
        """Return how the experiment gets its tasks."""
        return "push"


class ExperimentDetail(ExperimentOutput):
    """An experiment with how many of its rollouts are in each state."""

    rollouts = serializers.SerializerMethodField()

    class Meta(ExperimentOutput.Meta):
        fields = [*ExperimentOutput.Meta.fields, "rollouts"]

    def get_rollouts(self, experiment: Experiment) -> dict[str, int]:
        """Return the number of rollouts by state, as the view counted them."""
        counts: dict[str, int] = self.context["counts"]
        return counts


class StoppedOutput(serializers.Serializer[Any]):
    """What stopping an experiment did."""

    state = serializers.CharField()
    cancelled = serializers.IntegerField(help_text="Rollouts that were unfinished.")
