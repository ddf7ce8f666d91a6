"""The pages of policies' updates: what they show, and who may begin, complete and abandon."""

from typing import Any

import pytest
from django.test import Client

from rollouts.models import PolicyUpdate
from tests import factories

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.broker]


@pytest.fixture
def operator_page(client: Client) -> Client:
    client.force_login(factories.make_user(is_staff=True, is_superuser=True))
    return client


def act(client: Client, model: str, name: str, row: Any) -> str:
    """Carry out an action on one row; return the page that follows."""
    path = f"/admin/rollouts/{model}/"
    answer = client.post(path, {"action": name, "_selected_action": [str(row.pk)]}, follow=True)
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_begin_and_abandon(operator_page: Client) -> None:
    policy = factories.make_policy()

    page = act(operator_page, "policy", "begin_drain_calls", policy)

    assert "Begin: 1 done, 0 skipped, 0 failed." in page
    update = PolicyUpdate.objects.get()
    assert (update.from_version, update.to_version, update.mode) == (3, 4, "drain-calls")
    assert "Begin: 0 done, 1 skipped" in act(operator_page, "policy", "begin_abort", policy)

    page = act(operator_page, "policyupdate", "abandon", update)

    assert "Abandon: 1 done" in page
    update.refresh_from_db()
    assert update.state == "abandoned"
    assert update.detail.endswith("in the admin.")


def test_complete(operator_page: Client) -> None:
    update = factories.make_policy_update()

    assert "Complete: 1 done" in act(operator_page, "policyupdate", "complete", update)

    update.policy.refresh_from_db()
    assert update.policy.version == 4


def test_the_page_tells_what_is_under_way(operator_page: Client) -> None:
    update = factories.make_policy_update(
        servers=[
            {"server": "s", "url": "http://a", "version": None, "said": "not told", "ok": True}
        ]
    )

    page = operator_page.get(f"/admin/rollouts/policyupdate/{update.pk}/change/").content.decode()

    assert "generations: 0; rollouts: 0" in page
    assert "not told" in page


def test_without_permission_nothing_changes(client: Client) -> None:
    update = factories.make_policy_update()
    client.force_login(factories.make_user(is_staff=True))

    answer = client.post(
        "/admin/rollouts/policyupdate/",
        {"action": "complete", "_selected_action": [str(update.pk)]},
    )

    assert answer.status_code == 403
    update.refresh_from_db()
    assert update.state == "ready"
