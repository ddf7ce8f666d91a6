"""Addresses of the trainer's calls, below the API's prefix."""

from typing import Any

from django.urls import path
from rest_framework.routers import SimpleRouter

from rollouts.api.views.batches import BatchViewSet, ExperimentBatchViewSet
from rollouts.api.views.environment_files import EnvironmentFileViewSet
from rollouts.api.views.evaluations import EvaluationViewSet
from rollouts.api.views.events import ExperimentEventsView, listened
from rollouts.api.views.experiments import ExperimentViewSet
from rollouts.api.views.groups import ExperimentGroupViewSet, GroupViewSet
from rollouts.api.views.metrics import ExperimentMetricsView
from rollouts.api.views.policies import PolicyUpdateViewSet, PolicyViewSet, ServerViewSet
from rollouts.api.views.reevaluations import (
    ExperimentReevaluationViewSet,
    ReevaluationViewSet,
    RolloutEvaluationViewSet,
)
from rollouts.api.views.rollouts import RolloutViewSet
from rollouts.api.views.snapshots import RolloutSnapshotViewSet, SnapshotViewSet
from rollouts.api.views.task_imports import TaskImportViewSet
from rollouts.api.views.tasks import TaskSetViewSet, TaskViewSet
from rollouts.api.views.verifications import (
    EnvironmentVerificationViewSet,
    VerificationViewSet,
)
from rollouts.api.views.webhooks import (
    DeliveryViewSet,
    ExperimentWebhookViewSet,
    WebhookViewSet,
)
from rollouts.api.waiting import long_polled

router = SimpleRouter(use_regex_path=False)
router.register("experiments", ExperimentViewSet)
router.register("evaluations", EvaluationViewSet)
router.register("groups", GroupViewSet)
router.register("batches", BatchViewSet)
router.register("reevaluations", ReevaluationViewSet)
router.register("rollouts", RolloutViewSet)
router.register("policies", PolicyViewSet)
router.register("inference-servers", ServerViewSet)
router.register("task-sets/imports", TaskImportViewSet)
router.register("task-sets", TaskSetViewSet)
router.register("snapshots", SnapshotViewSet)
router.register("verifications", VerificationViewSet)
router.register("webhooks", WebhookViewSet)

_LIST_AND_CREATE: Any = {"get": "list", "post": "create"}

urlpatterns = [
    *router.urls,
    path(
        "environments/import/",
        EnvironmentFileViewSet.as_view({"post": "create"}),
        name="environment-import",
    ),
    path(
        "environments/<uuid:environment_id>/export/",
        EnvironmentFileViewSet.as_view({"get": "export"}),
        name="environment-export",
    ),
    path(
        "environments/<uuid:environment_id>/diff/",
        EnvironmentFileViewSet.as_view({"get": "diff"}),
        name="environment-diff",
    ),
    path(
        "environments/<uuid:environment_id>/verifications/",
        EnvironmentVerificationViewSet.as_view(_LIST_AND_CREATE),
        name="environment-verifications",
    ),
    path(
        "experiments/<uuid:experiment_id>/groups/",
        ExperimentGroupViewSet.as_view(_LIST_AND_CREATE),
        name="experiment-groups",
    ),
    path(
        "experiments/<uuid:experiment_id>/groups/counts/",
        ExperimentGroupViewSet.as_view({"get": "counts"}),
        name="experiment-group-counts",
    ),
    path(
        "experiments/<uuid:experiment_id>/batches/",
        long_polled(ExperimentBatchViewSet.as_view(_LIST_AND_CREATE)),
        name="experiment-batches",
    ),
    path(
        "experiments/<uuid:experiment_id>/events/",
        listened(ExperimentEventsView.as_view()),
        name="experiment-events",
    ),
    path(
        "experiments/<uuid:experiment_id>/metrics/",
        ExperimentMetricsView.as_view(),
        name="experiment-metrics",
    ),
    path(
        "experiments/<uuid:experiment_id>/reevaluations/",
        ExperimentReevaluationViewSet.as_view(_LIST_AND_CREATE),
        name="experiment-reevaluations",
    ),
    path(
        "experiments/<uuid:experiment_id>/webhooks/",
        ExperimentWebhookViewSet.as_view(_LIST_AND_CREATE),
        name="experiment-webhooks",
    ),
    path(
        "webhooks/<uuid:webhook_id>/deliveries/",
        DeliveryViewSet.as_view({"get": "list"}),
        name="webhook-deliveries",
    ),
    path(
        "webhooks/<uuid:webhook_id>/deliveries/<uuid:delivery_id>/redeliver/",
        DeliveryViewSet.as_view({"post": "redeliver"}),
        name="webhook-redeliver",
    ),
    path(
        "policies/<uuid:policy_id>/updates/",
        PolicyUpdateViewSet.as_view(_LIST_AND_CREATE),
        name="policy-updates",
    ),
    path(
        "policies/<uuid:policy_id>/updates/<int:number>/",
        PolicyUpdateViewSet.as_view({"get": "retrieve"}),
        name="policy-update",
    ),
    path(
        "policies/<uuid:policy_id>/updates/<int:number>/complete/",
        PolicyUpdateViewSet.as_view({"post": "complete"}),
        name="policy-update-complete",
    ),
    path(
        "policies/<uuid:policy_id>/updates/<int:number>/abandon/",
        PolicyUpdateViewSet.as_view({"post": "abandon"}),
        name="policy-update-abandon",
    ),
    path(
        "rollouts/<uuid:rollout_id>/evaluations/",
        RolloutEvaluationViewSet.as_view({"get": "list"}),
        name="rollout-evaluations",
    ),
    path(
        "rollouts/<uuid:rollout_id>/evaluations/<uuid:evaluation_id>/evidence/",
        RolloutEvaluationViewSet.as_view({"get": "evidence"}),
        name="rollout-evidence",
    ),
    path(
        "rollouts/<uuid:rollout_id>/snapshots/",
        RolloutSnapshotViewSet.as_view(_LIST_AND_CREATE),
        name="rollout-snapshots",
    ),
    path(
        "task-sets/<uuid:task_set_id>/tasks/",
        TaskViewSet.as_view({"get": "list"}),
        name="task-set-tasks",
    ),
]
