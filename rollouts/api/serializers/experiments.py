"""Experiments: input and output."""

from typing import Any

from rest_framework import serializers

from rollouts.api.feed_fields import FeedSettingsField, FiltersField, SelectionField
from rollouts.api.fields import OptionsField, PolicyField, TaskSetsField
from rollouts.api.serializers.policies import ServerAnswerOutput
from rollouts.models import Experiment, Policy
from rollouts.models.experiment import MAX_SAMPLES
from rollouts.modes import MODES, mode_of
from rollouts.options import Budgets, Sampling
from rollouts.services.feed import is_exhausted
from rollouts.states import Feed, LagAction
from sandboxes.api.strict import BIG_INTEGER_MAX, INTEGER_MAX, StrictSerializer

PRIORITY_LIMIT = 1_000_000


class ExperimentChanges(StrictSerializer):
    """What can be changed of an experiment; the answer says from what on each change holds."""

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
        help_text="Policy version at the lease of a group, minus that of its oldest token; no "
        "rollout's tokens span more either. null: any.",
    )
    mode = serializers.ChoiceField(
        choices=MODES,
        required=False,
        help_text="`synchronous`: lag 0, unfinished groups are cancelled; `one-step-off`: lag 1, "
        "they are carried over; `asynchronous`: `max_policy_lag` as given, 4 if it is not.",
    )
    on_policy_lag = serializers.ChoiceField(
        choices=LagAction.values,
        required=False,
        help_text="What becomes of a rollout that would go beyond it: `cut` ends and scores it, "
        "`drop` cancels it, `keep` lets it go on.",
    )
    feed_settings = FeedSettingsField(
        required=False, help_text="How the tasks are drawn when `feed` is `pull`."
    )
    filters = FiltersField(
        required=False, help_text="Rules that keep groups from the trainer, asked in order."
    )
    selection = SelectionField(
        required=False, help_text="Which finished groups make a batch, and what ends the others."
    )

    force = serializers.BooleanField(
        required=False,
        source="allow_broken",
        help_text="Run on environments that a verification found broken.",
    )


class ExperimentInput(ExperimentChanges):
    """A new experiment."""

    policy = PolicyField(help_text="Name or id.")
    feed = serializers.ChoiceField(
        choices=Feed.values,
        required=False,
        help_text="`push`: groups are what the trainer posts; `pull`: they are drawn from the "
        "task sets.",
    )


class ExperimentOutput(serializers.ModelSerializer[Experiment]):
    """An experiment."""

    owner = serializers.SlugRelatedField[Any](slug_field="username", read_only=True)
    policy = serializers.SlugRelatedField[Policy](slug_field="name", read_only=True)
    policy_id = serializers.UUIDField(read_only=True)
    policy_version = serializers.IntegerField(source="policy.version", read_only=True)
    task_sets = serializers.SlugRelatedField[Any](slug_field="name", many=True, read_only=True)
    mode = serializers.SerializerMethodField()
    sampling = OptionsField(Sampling, read_only=True)
    budgets = OptionsField(Budgets, read_only=True)
    feed_settings = FeedSettingsField(read_only=True)
    filters = FiltersField(read_only=True)
    selection = SelectionField(read_only=True)
    exhausted = serializers.SerializerMethodField()
    force = serializers.BooleanField(source="allow_broken", read_only=True)

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
            "purpose",
            "feed",
            "state",
            "group_size",
            "sampling",
            "budgets",
            "priority",
            "share",
            "max_attempts",
            "failure_reward",
            "force",
            "max_policy_lag",
            "on_policy_lag",
            "mode",
            "feed_settings",
            "filters",
            "selection",
            "feed_epoch",
            "feed_position",
            "feed_detail",
            "exhausted",
            "created_at",
        ]

    def get_mode(self, experiment: Experiment) -> str:
        """Return the mode that the bound on lag makes."""
        return mode_of(experiment.max_policy_lag)

    def get_exhausted(self, experiment: Experiment) -> bool:
        """Return whether the feed has nothing more: what is coming is all that comes."""
        return is_exhausted(experiment)


class ExperimentDetail(ExperimentOutput):
    """An experiment with how many of its rollouts and of its groups are in each state."""

    rollouts = serializers.SerializerMethodField()
    coming = serializers.SerializerMethodField()

    class Meta(ExperimentOutput.Meta):
        fields = [*ExperimentOutput.Meta.fields, "rollouts", "coming"]

    def get_rollouts(self, experiment: Experiment) -> dict[str, int]:
        """Return the number of rollouts by state, as the view counted them."""
        counts: dict[str, int] = self.context["counts"]
        return counts

    def get_coming(self, experiment: Experiment) -> dict[str, int]:
        """Return how many groups are open and ready, as the view counted them."""
        coming: dict[str, int] = self.context["coming"]
        return coming


class ExperimentChanged(ExperimentDetail):
    """An experiment after a change, and from what on each changed setting holds."""

    takes_effect = serializers.SerializerMethodField()

    class Meta(ExperimentDetail.Meta):
        fields = [*ExperimentDetail.Meta.fields, "takes_effect"]

    def get_takes_effect(self, experiment: Experiment) -> dict[str, str]:
        """Return by setting from what on its change holds."""
        effects: dict[str, str] = self.context["takes_effect"]
        return effects


class RewindInput(StrictSerializer):
    """Which version the trainer restarted from."""

    version = serializers.IntegerField(
        min_value=0, max_value=BIG_INTEGER_MAX, help_text="At most the policy's present version."
    )
    force = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Even though other experiments sample from the policy.",
    )


class RewindOutput(serializers.Serializer[Any]):
    """What a rewind did."""

    version = serializers.IntegerField()
    batches = serializers.IntegerField(help_text="Given out since then; they are `rewound`.")
    groups_ready = serializers.IntegerField(help_text="Of them, that can be leased again.")
    groups_filtered = serializers.IntegerField(help_text="Which sampled a newer version.")
    tasks_returned = serializers.IntegerField(help_text="Of those, drawn again by the feed.")
    rollouts_cancelled = serializers.IntegerField()
    servers = ServerAnswerOutput(many=True)


class StoppedOutput(serializers.Serializer[Any]):
    """What stopping an experiment did."""

    state = serializers.CharField()
    cancelled = serializers.IntegerField(help_text="Rollouts that were unfinished.")
