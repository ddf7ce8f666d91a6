"""Models of the assembly line."""

from rollouts.models.batch import Batch
from rollouts.models.experiment import Experiment, Group
from rollouts.models.idempotency import IdempotencyRecord
from rollouts.models.policy import InferenceServer, Policy, PolicyUpdate
from rollouts.models.rollout import Attempt, JournalEntry, Rollout
from rollouts.models.task import Task, TaskSet
from rollouts.models.token import TrainerToken
from rollouts.models.trajectory import Evaluation, Trajectory
from rollouts.models.worker import Worker

__all__ = [
    "Attempt",
    "Batch",
    "Evaluation",
    "Experiment",
    "Group",
    "IdempotencyRecord",
    "InferenceServer",
    "JournalEntry",
    "Policy",
    "PolicyUpdate",
    "Rollout",
    "Task",
    "TaskSet",
    "TrainerToken",
    "Trajectory",
    "Worker",
]
