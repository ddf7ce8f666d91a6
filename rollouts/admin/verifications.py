"""Admin of verifications: how far they are, and their reports."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from rollouts.admin.actions import act
from rollouts.models import Verification
from rollouts.services.verifications import cancel_verification, done_of
from sandboxes.admin.base import ReadOnlyAdmin
from sandboxes.admin.shown import NOTHING, block, plain

RED, GREEN, QUIET = "#ba2121", "#1a7f37", "inherit"
COLOURS = {
    **dict.fromkeys(("broken", "failed", "flaky"), RED),
    **dict.fromkeys(("verified", "passed"), GREEN),
}
CHECKS = ("starts", "setup", "solution", "nothing", "repeats")
ROLES = ("oracle", "noop")
MAX_SHOWN = 100


@admin.register(Verification)
class VerificationAdmin(ReadOnlyAdmin):
    """Show what verifications found; cancel one that runs."""

    list_display = [
        *("id", "environment", "task_set", "state", "verdict_shown", "task_count"),
        *("requested_by", "created_at", "ended_at"),
    ]
    list_select_related = ["environment", "task_set", "requested_by"]
    list_filter = ["state", "verdict"]
    search_fields = ["id"]
    search_ids = ("id", "environment", "experiment")
    ordering = ["-created_at"]
    fieldsets = [
        (
            None,
            {
                "fields": [
                    *("id", "environment", "task_set", "state", "verdict_shown", "progress"),
                    *("requested_by", "created_at", "deadline_at", "ended_at"),
                ]
            },
        ),
        (
            "What was asked",
            {"fields": ["task_count", "repeats", "seed", "threshold", "tolerance"]},
        ),
        ("What was found", {"fields": ["times", "tasks"]}),
    ]
    actions = ["cancel"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Verification]:
        """Return them without their reports, which only a page reads."""
        return super().get_queryset(request).defer("report")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Show the report's parts beside the columns."""
        found = super().get_readonly_fields(request, obj)
        return [*found, "verdict_shown", "progress", "times", "tasks"]

    @admin.display(description="verdict", ordering="verdict")
    def verdict_shown(self, verification: Verification) -> str:
        """Return the verdict as a badge."""
        return _badge(verification.verdict) if verification.verdict else NOTHING

    @admin.display(description="rollouts")
    def progress(self, verification: Verification) -> str:
        """Return how many of its rollouts are done."""
        done, everything = done_of(verification)
        link = reverse("admin:rollouts_rollout_changelist")
        return format_html(
            '<a href="{}?experiment__id__exact={}">{} of {} done</a>',
            link,
            verification.experiment_id,
            done,
            everything,
        )

    @admin.display(description="seconds")
    def times(self, verification: Verification) -> str:
        """Return the times by stage."""
        seconds = verification.report.get("seconds", {})
        return (
            format_html_join(
                "",
                "<div><strong>{}</strong>: median {} s, 90 % within {} s, longest {} s</div>",
                ((stage, each["p50"], each["p90"], each["max"]) for stage, each in seconds.items()),
            )
            or NOTHING
        )

    @admin.display(description="tasks")
    def tasks(self, verification: Verification) -> str:
        """Return a table of the tasks, those that failed first, with their logs."""
        found = verification.report.get("tasks", [])
        if not found:
            return NOTHING
        rows = format_html_join("", "{}", ((_row(each),) for each in found[:MAX_SHOWN]))
        head = format_html_join("", '<th scope="col">{}</th>', ((name,) for name in CHECKS))
        left = len(found) - MAX_SHOWN
        more = f"{left} more tasks passed or are in the API's report" if left > 0 else ""
        return format_html(
            '<table><thead><tr><th scope="col">task</th><th scope="col">is</th>{}'
            '<th scope="col">rewards</th></tr></thead><tbody>{}</tbody></table>{}',
            head,
            rows,
            more,
        )

    @admin.action(description="Cancel: end with what is there", permissions=["operate"])
    def cancel(self, request: HttpRequest, rows: QuerySet[Verification]) -> None:
        """Cancel verifications."""
        act(
            self,
            request,
            rows,
            verb="Cancel",
            call=lambda row: cancel_verification(verification_id=row.pk),
        )


def _badge(word: str) -> SafeString:
    return format_html('<strong style="color:{}">{}</strong>', COLOURS.get(word, QUIET), word)


def _row(task: dict[str, Any]) -> SafeString:
    checks = format_html_join(
        "", "<td>{}</td>", ((_badge(task["checks"].get(name, "")),) for name in CHECKS)
    )
    rewards = "; ".join(
        f"{role} {', '.join('-' if each is None else f'{each:g}' for each in found)}"
        for role in ROLES
        if (found := task["rewards"].get(role))
    )
    said = "\n".join(filter(None, (task["detail"], task["log"])))
    log: SafeString | str = mark_safe("")
    if said:
        log = format_html('<tr><td colspan="{}">{}</td></tr>', len(CHECKS) + 3, block(said))
    return format_html(
        '<tr><td><a href="{}">{}</a></td><td>{}</td>{}<td>{}</td></tr>{}',
        reverse("admin:rollouts_task_change", args=[task["task"]]),
        plain(task["ref"]),
        _badge(task["state"]),
        checks,
        rewards,
        log,
    )
