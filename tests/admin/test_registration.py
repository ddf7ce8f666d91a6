"""Every model has its page; what workers write is shown and never written."""

import pytest
from django.apps import apps
from django.contrib import admin

from rollouts.models import (
    Attempt,
    Batch,
    Evaluation,
    EvaluationRun,
    Experiment,
    FeedPlan,
    FeedReturn,
    Group,
    IdempotencyRecord,
    InferenceServer,
    JournalEntry,
    Policy,
    PolicyUpdate,
    Reevaluation,
    RejectedRow,
    Rollout,
    Task,
    TaskImport,
    TaskProgress,
    TaskSet,
    TrainerToken,
    Trajectory,
    Verification,
    Webhook,
    WebhookDelivery,
    Worker,
)
from sandboxes.models import Environment, Image, ImageBuild, Node, Sandbox, Snapshot
from tests.admin import factories
from tests.factories import (
    make_policy_update,
    make_rejected_row,
    make_task_import,
    make_verification,
)

READ_ONLY = {
    Rollout: factories.make_rollout,
    Attempt: factories.make_attempt,
    JournalEntry: factories.make_journal_entry,
    ImageBuild: factories.make_image_build,
    Sandbox: factories.make_sandbox,
    Snapshot: factories.make_snapshot,
    Trajectory: factories.make_trajectory,
    Evaluation: factories.make_evaluation,
    Reevaluation: factories.make_reevaluation,
    Batch: factories.make_batch,
    Worker: factories.make_worker,
    IdempotencyRecord: factories.make_record,
    Group: factories.make_group,
    PolicyUpdate: make_policy_update,
    EvaluationRun: factories.make_evaluation_run,
    FeedPlan: factories.make_feed_plan,
    FeedReturn: factories.make_feed_return,
    TaskProgress: factories.make_task_progress,
    Verification: make_verification,
    Webhook: factories.make_webhook,
    WebhookDelivery: factories.make_webhook_delivery,
    TaskImport: make_task_import,
    RejectedRow: make_rejected_row,
}
EDITABLE = {
    Environment: factories.make_environment,
    Experiment: factories.make_experiment,
    InferenceServer: factories.make_server,
    Image: factories.make_image,
    Policy: factories.make_policy,
    TaskSet: lambda: factories.make_task().task_set,
    Task: factories.make_task,
    Node: factories.make_node,
    TrainerToken: factories.make_token,
}
ALL = {**READ_ONLY, **EDITABLE}

pytestmark = pytest.mark.django_db


def name_of(value: object) -> str:
    return getattr(value, "__name__", "")


def test_every_model_of_both_applications_is_registered() -> None:
    models = {
        *apps.get_app_config("rollouts").get_models(),
        *apps.get_app_config("sandboxes").get_models(),
    }
    through = TrainerToken.experiments.through, Experiment.task_sets.through

    assert models - set(through) == set(ALL)
    assert models - set(through) <= set(admin.site._registry)


@pytest.mark.parametrize("model", READ_ONLY, ids=name_of)
def test_what_workers_write_cannot_be_added_changed_or_deleted(operator, model) -> None:
    row = READ_ONLY[model]()
    before = model.objects.values().get(pk=row.pk)

    assert operator.get(model, "add").status_code == 403
    assert operator.post(model, "add", {}).status_code == 403
    assert operator.post(model, "change", {"state": "done"}, row.pk).status_code == 403
    assert operator.post(model, "delete", {"post": "yes"}, row.pk).status_code == 403
    assert model.objects.values().get(pk=row.pk) == before
    assert b"delete_selected" not in operator.get(model).content


@pytest.mark.parametrize("model", ALL, ids=name_of)
def test_list_and_page_of_every_model_open(operator, model) -> None:
    row = ALL[model]()

    assert operator.get(model).status_code == 200
    assert operator.get(model, "change", row.pk).status_code == 200


@pytest.mark.parametrize("model", EDITABLE, ids=name_of)
def test_page_for_a_new_row_opens(operator, model) -> None:
    assert operator.get(model, "add").status_code == 200


@pytest.mark.parametrize("model", ALL, ids=name_of)
def test_a_list_takes_as_many_queries_for_six_rows_as_for_two(
    operator, model, django_assert_num_queries
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    for _ in range(2):
        ALL[model]()
    with CaptureQueriesContext(connection) as two:
        operator.get(model)
    for _ in range(4):
        ALL[model]()

    with django_assert_num_queries(len(two)):
        operator.get(model)


@pytest.mark.parametrize("model", ALL, ids=name_of)
@pytest.mark.parametrize(
    "term", ["nothing-like-it", "%", "' OR 1=1 --", "00000000-0000-0000-0000-000000000000"]
)
def test_a_search_without_a_match_is_an_empty_list(operator, model, term) -> None:
    ALL[model]()

    answer = operator.client.get(operator.get(model).wsgi_request.path, {"q": term})

    assert answer.status_code == 200
    assert answer.context["cl"].result_count == 0


def test_a_rollout_is_found_by_its_own_its_groups_and_its_experiments_id(operator) -> None:
    rollout = factories.make_rollout()
    factories.make_rollout()

    for number in (rollout.pk, rollout.group_id, rollout.experiment_id):
        found = operator.get(Rollout, query=f"?q={number}").context["cl"].queryset
        assert list(found) == [rollout]


def test_a_user_without_permission_sees_and_changes_nothing(client) -> None:
    from django.contrib.auth import get_user_model

    client.force_login(get_user_model().objects.create_user("helper", is_staff=True))
    rollout = factories.make_rollout()
    path = "/admin/rollouts/rollout/"

    assert client.get(path).status_code == 403
    answer = client.post(path, {"action": "cancel", "_selected_action": [rollout.pk]})
    assert answer.status_code == 403
    rollout.refresh_from_db()
    assert rollout.cancel_requested_at is None


def test_viewing_permission_alone_offers_no_action(client) -> None:
    from django.contrib.auth import get_user_model
    from django.contrib.auth.models import Permission

    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_rollout"))
    client.force_login(user)
    rollout = factories.make_rollout()
    path = "/admin/rollouts/rollout/"

    assert client.get(path).status_code == 200
    client.post(path, {"action": "cancel", "_selected_action": [rollout.pk]})
    rollout.refresh_from_db()
    assert rollout.cancel_requested_at is None
    assert rollout.state == "queued"
