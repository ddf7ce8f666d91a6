"""Admin of experiments and groups."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join

from rollouts.admin.actions import act
from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.models import Batch, Experiment, Group, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services.cancel import cancel_group, stop_experiment
from rollouts.services.submit import create_experiment, set_experiment_state, update_experiment
from rollouts.states import ExperimentState, RolloutState
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
)


class ExperimentForm(forms.ModelForm):  # type: ignore[type-arg]
    """Check sampling parameters and budgets; what is left out gets its default."""

    class Meta:
        model = Experiment
        fields = (*SAVED, "task_sets")

    def clean_sampling(self) -> dict[str, Any]:
        """Return all sampling parameters."""
        return self._parsed(Sampling, "sampling")

    def clean_budgets(self) -> dict[str, Any]:
        """Return all budgets."""
        return self._parsed(Budgets, "budgets")

    def _parsed(self, options: type[Sampling | Budgets], name: str) -> dict[str, Any]:
        value = self.cleaned_data[name]
        try:
            return options.parse({} if value is None else value).as_dict()
        except InvalidValue as error:
            raise ValidationError(str(error)) from error


@admin.register(Experiment)
class ExperimentAdmin(BaseAdmin):
    """Edit, pause, resume and stop experiments."""

    form = ExperimentForm
    list_display = ["name", "state", "owner", "policy", "shown", "priority", "share", "created_at"]
    list_select_related = ["owner", "policy"]
    list_filter = ["state", "policy", "created_at"]
    search_fields = ["name"]
    search_prefixes = ("name",)
    autocomplete_fields = ["owner", "policy", "task_sets"]
    readonly_fields = ["id", "state", "progress", "shown", "created_at"]
    fieldsets = [
        (None, {"fields": ["name", "owner", "policy", "task_sets"]}),
        ("How it stands", {"fields": ["id", "state", "progress", "shown", "created_at"]}),
        ("Sampling", {"fields": ["group_size", "sampling", "budgets"]}),
        ("Scheduling", {"fields": ["priority", "share", "max_attempts", "failure_reward"]}),
    ]
    actions = ["pause", "resume", "stop"]

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
            changed = {name: getattr(obj, name) for name in form.changed_data if name in SAVED}
            update_experiment(experiment_id=obj.pk, **changed)
            return
        created = create_experiment(**{name: getattr(obj, name) for name in SAVED})
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

    list_display = ["id", "sequence", "experiment", "task", "state", "done_count", "size", "batch"]
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
        "created_at",
        "ready_at",
    ]
    inlines = [RolloutInline]
    actions = ["cancel"]

    @admin.action(description="Cancel what is unfinished", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[Group]) -> None:
        """Cancel groups."""
        act(self, request, rows, verb="Cancel", call=lambda row: cancel_group(group_id=row.pk))
