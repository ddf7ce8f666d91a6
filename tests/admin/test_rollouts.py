"""Cancel and retry from the admin, and the links between rows."""

import pytest

from rollouts.models import Rollout
from tests.admin.factories import (
    end,
    make_attempt,
    make_group,
    make_rollout,
    make_running_attempt,
    make_sandbox,
    make_trajectory,
)

pytestmark = pytest.mark.django_db


def test_cancel_ends_what_waits_asks_what_runs_and_skips_what_is_done(operator) -> None:
    waiting, running, done = make_rollout(), make_rollout(), end(make_rollout(), "scored")
    make_running_attempt(running)

    said = operator.act(Rollout, "cancel", waiting, running, done)

    assert said == (
        f"Cancel: 2 done, 1 skipped, 0 failed. {done}: The rollout is done already (scored)."
    )
    waiting.refresh_from_db()
    running.refresh_from_db()
    done.refresh_from_db()
    assert (waiting.state, waiting.outcome) == ("done", "cancelled")
    assert (running.state, running.outcome) == ("run", None)
    assert running.cancel_requested_at is not None
    assert (done.outcome, done.cancel_requested_at) == ("scored", None)


def test_retry_takes_what_ended_without_a_score_and_skips_the_rest(operator) -> None:
    group = make_group(samples=3)
    failed, scored, waiting = group.rollouts.order_by("sample")
    end(failed, "infra_failed", failure_code="sandbox.image_missing")
    end(scored, "scored", reward=0.25)

    said = operator.act(Rollout, "retry", failed, scored, waiting)

    assert said.startswith("Retry: 1 done, 2 skipped, 0 failed. ")
    assert f"{scored}: The rollout was scored; its result stands." in said
    assert f"{waiting}: The rollout is in queued; only what is done can be tried again." in said
    failed.refresh_from_db()
    scored.refresh_from_db()
    group.refresh_from_db()
    assert (failed.state, failed.outcome, failed.failure_code) == ("queued", None, "")
    assert (scored.state, scored.reward) == ("done", 0.25)
    assert (group.state, group.done_count) == ("open", 1)


def test_many_reasons_are_cut_to_three(operator) -> None:
    rows = [make_rollout() for _ in range(5)]

    said = operator.act(Rollout, "retry", *rows)

    assert said.startswith("Retry: 0 done, 5 skipped, 0 failed. ")
    assert said.endswith(" (and 2 more)")
    assert said.count("only what is done") == 3


def test_a_database_fault_counts_as_failed_and_the_others_go_on(operator, monkeypatch) -> None:
    from django.db import OperationalError

    from rollouts.admin import rollouts as module

    broken, good = make_rollout(), make_rollout()
    real = module.cancel_rollout

    def cancel(*, rollout_id):
        if rollout_id == broken.pk:
            raise OperationalError("server closed the connection")
        return real(rollout_id=rollout_id)

    monkeypatch.setattr(module, "cancel_rollout", cancel)

    said = operator.act(Rollout, "cancel", broken, good)

    assert said == (
        f"Cancel: 1 done, 0 skipped, 1 failed. {broken}: the database refused; see the log"
    )
    good.refresh_from_db()
    assert good.outcome == "cancelled"


def test_the_page_links_to_attempts_trajectory_group_and_sandboxes(operator) -> None:
    attempt = make_attempt(failure_code="run.worker_lost")
    rollout = attempt.rollout
    trajectory = make_trajectory(rollout=rollout)
    sandbox = make_sandbox(owner=rollout.pk)
    make_sandbox()

    page = operator.get(Rollout, "change", rollout.pk).content.decode()

    assert "run.worker_lost" in page
    assert f'href="/admin/rollouts/trajectory/{trajectory.pk}/change/"' in page
    assert f'href="/admin/rollouts/group/{rollout.group_id}/change/"' in page
    attempts = f"/admin/rollouts/attempt/?rollout__id__exact={rollout.pk}"
    sandboxes = f"/admin/sandboxes/sandbox/?owner={rollout.pk}"
    journal = f"/admin/rollouts/journalentry/?rollout__id__exact={rollout.pk}"
    assert all(f'href="{link}"' in page for link in (attempts, sandboxes, journal))
    assert list(operator.client.get(attempts).context["cl"].queryset) == [attempt]
    assert list(operator.client.get(sandboxes).context["cl"].queryset) == [sandbox]
    assert list(operator.client.get(journal).context["cl"].queryset) == []


def test_what_the_agent_wrote_is_inert_on_the_rollouts_page(operator) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    rollout = make_rollout(answer=hostile, last_message=hostile, failure_detail=hostile)

    page = operator.get(Rollout, "change", rollout.pk).content.decode()

    assert "<img src=x" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") == 3


def test_a_list_is_never_counted_beyond_its_bound(operator, monkeypatch) -> None:
    from sandboxes.admin import base

    make_group(samples=5)
    monkeypatch.setattr(base, "LIST_LIMIT", 3)

    answer = operator.get(Rollout)

    assert answer.context["cl"].result_count == 3
    assert answer.context["cl"].full_result_count is None
