"""Admin of experiments and groups."""

import json
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from rollouts.admin.actions import act
from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.feed_options import FeedSettings
from rollouts.models import Batch, Experiment, Group, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.selection_options import CANCEL, Selection, parse_filters
from rollouts.services.broken import refuse_broken_sets
from rollouts.services.cancel import cancel_group, stop_experiment
from rollouts.services.experiments import (
    check_settings,
    create_experiment,
    set_experiment_state,
    update_experiment,
)
from rollouts.states import ExperimentState, Purpose, RolloutState
from sandboxes.admin.base import BaseAdmin, ReadOnlyAdmin, ReadOnlyInline, list_link

SAVED = (
    "owner",
    "name",
    "policy",
    "group_size",
    "sampling",
    "budgets",
    "priority",
    "share",
    "max_attempts",
    "failure_reward",
    "allow_broken",
    "max_policy_lag",
    "on_policy_lag",
    "feed_settings",
    "filters",
    "selection",
)
FEED_STATE = ("feed_epoch", "feed_position", "feed_detail")
# A feed cannot be exchanged: what was pulled has its place in it.
CREATED = (*SAVED, "feed")


class ExperimentForm(forms.ModelForm):  # type: ignore[type-arg]
    """Check each setting by its own parser; what is left out gets its default."""

    class Meta:
        model = Experiment
        fields = (*CREATED, "task_sets")

    def clean_sampling(self) -> dict[str, Any]:
        """Return all sampling parameters."""
        return self._parsed(Sampling, "sampling")

    def clean_budgets(self) -> dict[str, Any]:
        """Return all budgets."""
        return self._parsed(Budgets, "budgets")

    def clean_feed_settings(self) -> dict[str, Any]:
        """Return all settings of the feed."""
        return self._parsed(FeedSettings, "feed_settings")

    def clean_selection(self) -> dict[str, Any]:
        """Return all settings of the selection."""
        return self._parsed(Selection, "selection")

    def clean_filters(self) -> list[dict[str, Any]]:
        """Return the rules."""
        value = self.cleaned_data["filters"]
        try:
            return parse_filters([] if value is None else value)
        except InvalidValue as error:
            raise ValidationError(str(error)) from error

    def clean(self) -> dict[str, Any]:
        """Refuse what the settings say together; at lag 0 the selection's default is to cancel."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        if self.errors:
            return values
        given = json.loads(self.data.get("selection") or "{}")
        if values["max_policy_lag"] == 0 and "unfinished" not in given:
            values["selection"]["unfinished"] = CANCEL
        try:
            check_settings(
                feed=values.get("feed") or self.instance.feed,
                feed_settings=values["feed_settings"],
                task_sets=list(values["task_sets"]),
                group_size=values["group_size"],
                max_policy_lag=values["max_policy_lag"],
                selection=values["selection"],
            )
            if not values["allow_broken"]:
                refuse_broken_sets(task_sets=list(values["task_sets"]))
        except (InvalidValue, StateConflict) as error:
            raise ValidationError(str(error)) from error
        return values

    def _parsed(self, options: Any, name: str) -> dict[str, Any]:
        value = self.cleaned_data[name]
        try:
            parsed: dict[str, Any] = options.parse({} if value is None else value).as_dict()
        except InvalidValue as error:
            raise ValidationError(str(error)) from error
        return parsed


@admin.register(Experiment)
class ExperimentAdmin(BaseAdmin):
    """Edit, pause, resume and stop experiments."""

    form = ExperimentForm
    list_display = [
        *("name", "state", "owner", "policy", "purpose", "feed", "feed_detail", "shown"),
        *("priority", "share", "created_at"),
    ]
    list_select_related = ["owner", "policy"]
    list_filter = ["state", "purpose", "feed", "policy", "created_at"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    autocomplete_fields = ["owner", "policy", "task_sets"]
    fieldsets = [
        (None, {"fields": ["name", "owner", "policy", "task_sets"]}),
        (
            "How it stands",
            {"fields": ["id", "state", "purpose", "progress", *FEED_STATE, "shown", "created_at"]},
        ),
        ("Sampling", {"fields": ["group_size", "sampling", "budgets"]}),
        ("Feed", {"fields": ["feed", "feed_settings"]}),
        (
            "What reaches the trainer",
            {"fields": ["filters", "selection", "max_policy_lag", "on_policy_lag"]},
        ),
        (
            "Scheduling",
            {"fields": ["priority", "share", "max_attempts", "failure_reward", "allow_broken"]},
        ),
    ]
    actions = ["pause", "resume", "stop"]

    def fixed_fields(self, obj: Any) -> list[str]:
        """Keep what workers write, and how an experiment that exists is fed."""
        fixed = ["id", "state", "purpose", "progress", *FEED_STATE, "shown", "created_at"]
        return fixed if obj is None else [*fixed, "feed"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse for a verification's: it stays as it is."""
        if obj is not None and obj.purpose == Purpose.VERIFICATION:
            return False
        return super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse once something was submitted: rollouts by the million would go with it."""
        if obj is None or obj.groups.exists():
            return False
        return super().has_delete_permission(request, obj)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        """Propose the present user as the owner."""
        return {"owner": request.user.pk, **super().get_changeform_initial_data(request)}

    @admin.display(description="see")
    def shown(self, experiment: Experiment) -> str:
        """Return links to the experiment's rollouts, groups and batches."""
        kinds = ((Rollout, "rollouts"), (Group, "groups"), (Batch, "batches"))
        links = (list_link(kind, name, experiment__id__exact=experiment.pk) for kind, name in kinds)
        return format_html_join(" · ", "{}", ((link,) for link in links))

    @admin.display(description="rollouts")
    def progress(self, experiment: Experiment) -> str:
        """Return how many rollouts are in each state."""
        counts = dict(
            experiment.rollouts.order_by().values_list("state").annotate(count=Count("pk"))
        )
        return ", ".join(f"{counts.get(state, 0)} {state}" for state in RolloutState.values)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Create or change through the services; the task sets follow with the relations."""
        if change:
            changed: dict[str, Any] = {
                name: getattr(obj, name) for name in form.changed_data if name in SAVED
            }
            if "task_sets" in form.changed_data:
                changed["task_sets"] = list(form.cleaned_data["task_sets"])
            update_experiment(experiment_id=obj.pk, **changed)
            return
        sets = list(form.cleaned_data["task_sets"])
        values = {name: getattr(obj, name) for name in CREATED}
        created = create_experiment(**values, task_sets=sets)
        obj.pk, obj.created_at = created.pk, created.created_at
        obj._state.adding = False

    @admin.action(description="Pause: start nothing new", permissions=["change"])
    def pause(self, request: HttpRequest, rows: QuerySet[Experiment]) -> None:
        """Pause experiments."""
        act(self, request, rows, verb="Pause", call=lambda row: _set(row, ExperimentState.PAUSED))

    @admin.action(description="Resume", permissions=["change"])
    def resume(self, request: HttpRequest, rows: QuerySet[Experiment]) -> None:
        """Resume experiments."""
        act(self, request, rows, verb="Resume", call=lambda row: _set(row, ExperimentState.ACTIVE))

    @admin.action(description="Stop and cancel what is unfinished", permissions=["change"])
    def stop(self, request: HttpRequest, rows: QuerySet[Experiment]) -> None:
        """Stop experiments for good."""
        act(self, request, rows, verb="Stop", call=_stop)


def _set(experiment: Experiment, state: str) -> None:
    if experiment.state == state:
        raise StateConflict(f"It is {state} already.")
    set_experiment_state(experiment_id=experiment.pk, state=state)


def _stop(experiment: Experiment) -> None:
    if experiment.state == ExperimentState.STOPPED:
        raise StateConflict("It is stopped already.")
    stop_experiment(experiment_id=experiment.pk)


class RolloutInline(ReadOnlyInline):
    """Show the rollouts of a group."""

    model = Rollout
    fields = ["sample", "state", "outcome", "reward", "turns", "failure_code", "done_at"]
    ordering = ["sample"]


@admin.register(Group)
class GroupAdmin(ReadOnlyAdmin):
    """Show groups; cancel what is unfinished in them."""

    list_display = [
        "id",
        "sequence",
        "experiment",
        "task",
        "state",
        "filter_rule",
        "done_count",
        "size",
        "batch",
    ]
    list_select_related = ["experiment", "task", "batch"]
    list_filter = ["state"]
    search_fields = ["id"]
    search_ids = ("id", "experiment", "task", "batch")
    ordering = ["-sequence"]
    fields = [
        "id",
        "sequence",
        "experiment",
        "task",
        "environment",
        "state",
        "size",
        "done_count",
        "priority",
        "metadata",
        "batch",
        "last_batch",
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
    inlines = [RolloutInline]
    actions = ["cancel"]

    @admin.action(description="Cancel what is unfinished", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[Group]) -> None:
        """Cancel groups."""
        act(self, request, rows, verb="Cancel", call=lambda row: cancel_group(group_id=row.pk))
