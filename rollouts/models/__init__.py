"""Models of the assembly line."""

from rollouts.models.batch import Batch
from rollouts.models.evaluation_run import EvaluationRun
from rollouts.models.experiment import Experiment, Group
from rollouts.models.feed import FeedPlan, FeedReturn, TaskProgress
from rollouts.models.idempotency import IdempotencyRecord
from rollouts.models.policy import InferenceServer, Policy, PolicyUpdate
from rollouts.models.reevaluation import Reevaluation
from rollouts.models.rollout import Attempt, JournalEntry, Rollout
from rollouts.models.task import Task, TaskSet
from rollouts.models.task_import import RejectedRow, TaskImport
from rollouts.models.token import TrainerToken
from rollouts.models.trajectory import Evaluation, Trajectory
from rollouts.models.verification import Verification
from rollouts.models.webhook import Webhook, WebhookDelivery
from rollouts.models.worker import Worker

__all__ = [
    "Attempt",
    "Batch",
    "Evaluation",
    "EvaluationRun",
    "Experiment",
    "FeedPlan",
    "FeedReturn",
    "Group",
    "IdempotencyRecord",
    "InferenceServer",
    "JournalEntry",
    "Policy",
    "PolicyUpdate",
    "Reevaluation",
    "RejectedRow",
    "Rollout",
    "Task",
    "TaskImport",
    "TaskProgress",
    "TaskSet",
    "TrainerToken",
    "Trajectory",
    "Verification",
    "Webhook",
    "WebhookDelivery",
    "Worker",
]
