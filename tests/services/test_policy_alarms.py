"""An update that nobody completes times out to a defined state, and says so."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from rollouts.exceptions import StateConflict
from rollouts.models import Policy, PolicyUpdate
from rollouts.services.policy_alarms import (
    abandon_overdue_updates,
    alarm_of,
    alarm_of_policy,
    last_updates,
)
from rollouts.services.policy_updates import begin_update, complete_update
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def limit(settings: Any) -> None:
    settings.POLICY_UPDATE_LIMIT_SECONDS = 100.0


def make_update(*, ready: float | None, began: float, **columns: Any) -> PolicyUpdate:
    """Return an update that began, and became ready, so many seconds ago."""
    now = timezone.now()
    state = "quiescing" if ready is None else "ready"
    ready_at = None if ready is None else now - timedelta(seconds=ready)
    update = factories.make_policy_update(state=state, ready_at=ready_at, **columns)
    PolicyUpdate.objects.filter(pk=update.pk).update(created_at=now - timedelta(seconds=began))
    update.refresh_from_db()
    return update


@pytest.mark.parametrize(
    ("ready", "began", "state"),
    [(None, 101, "quiescing"), (101, 150, "ready")],
)
def test_one_that_is_not_ready_or_not_completed_in_time_is_abandoned(
    ready: float | None, began: float, state: str
) -> None:
    update = make_update(ready=ready, began=began)

    assert abandon_overdue_updates() == 1

    update.refresh_from_db()
    assert update.state == "abandoned"
    assert update.detail == (
        f"Timed out: it was {state} for 100 s (PRORL_POLICY_UPDATE_LIMIT_SECONDS). "
        "The policy stays at version 3; make sure that its servers serve that one."
    )
    policy = Policy.objects.get()
    assert (policy.version, policy.weights_epoch) == (3, 1)
    assert alarm_of(update) == f"Update 1 to version 4: {update.detail}"
    assert alarm_of_policy(policy) == alarm_of(update)
    assert abandon_overdue_updates() == 0
    with pytest.raises(StateConflict, match="abandoned"):
        complete_update(policy_id=policy.pk, number=1)


@pytest.mark.parametrize(("ready", "began"), [(None, 40), (40, 120)])
def test_one_that_has_time_left_is_left_alone(ready: float | None, began: float) -> None:
    update = make_update(ready=ready, began=began)

    assert abandon_overdue_updates() == 0

    update.refresh_from_db()
    assert update.state in ("quiescing", "ready")
    assert alarm_of(update) == ""


def test_an_open_one_raises_the_alarm_when_half_of_its_time_is_over() -> None:
    update = make_update(ready=60, began=90, mode="abort")

    assert alarm_of(update).startswith("Update 1 to version 4 has been ready for 60 s and holds")
    assert alarm_of(update).endswith("it is abandoned after 100 s.")


def test_the_alarm_ends_with_the_next_update() -> None:
    update = make_update(ready=101, began=101)
    abandon_overdue_updates()
    following = begin_update(policy_id=update.policy_id, version=4, mode="none")
    complete_update(policy_id=update.policy_id, number=following.number)

    (policy,) = Policy.objects.prefetch_related(last_updates())

    assert (policy.version, alarm_of_policy(policy)) == (4, "")
