"""Admin of trajectories: the conversation readable, and inert."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.loader import render_to_string

from rollouts.admin.conversation import Turn, read_segments, read_turns
from rollouts.admin.ordering import BY_ROLLOUT
from rollouts.exceptions import NotThere
from rollouts.models import Trajectory
from rollouts.services.trajectories import read_trajectory
from sandboxes.admin.base import ReadOnlyAdmin, object_link

MAX_SHOWN_BYTES = 32 * 1024 * 1024


@admin.register(Trajectory)
class TrajectoryAdmin(ReadOnlyAdmin):
    """Show where a trajectory is stored, its tokens and its conversation."""

    list_display = [
        "id",
        "rollout",
        "segments",
        "prompt_tokens",
        "response_tokens",
        "sampled_tokens",
        "trainable",
        "size_bytes",
        "created_at",
    ]
    list_select_related = ["rollout"]
    search_fields = ["id"]
    search_ids = ("id", "rollout")
    ordering = BY_ROLLOUT
    fields = [
        "id",
        "rollout_link",
        "segments",
        "prompt_tokens",
        "response_tokens",
        "sampled_tokens",
        "trainable",
        "first_policy_version",
        "last_policy_version",
        "conversation",
        "path",
        "size_bytes",
        "sha256",
        "created_at",
    ]
    readonly_fields = ["rollout_link", "conversation"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Trajectory]:
        """Return the trajectories with what reading one needs."""
        return (
            super()
            .get_queryset(request)
            .select_related("rollout__group__task", "rollout__environment")
        )

    @admin.display(description="rollout")
    def rollout_link(self, trajectory: Trajectory) -> str:
        """Return a link to the rollout."""
        return object_link(trajectory.rollout, trajectory.rollout_id)

    @admin.display(description="conversation")
    def conversation(self, trajectory: Trajectory) -> str:
        """Return the tokens per segment and the messages; every text is escaped."""
        if trajectory.size_bytes > MAX_SHOWN_BYTES:
            return f"{trajectory.size_bytes} bytes are too many for a page; read it over the API."
        try:
            content = read_trajectory(rollout=trajectory.rollout)
        except NotThere as error:
            return str(error)
        turns: list[Turn] = read_turns(content.get("messages"))
        return render_to_string(
            "admin/rollouts/trajectory/conversation.html",
            {"turns": turns, "segments": read_segments(content.get("segments"))},
        )
