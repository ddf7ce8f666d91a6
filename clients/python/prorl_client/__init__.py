"""Trainer's client of the rollout service.

from prorl_client import Client

with Client() as client:
    experiment = client.create_experiment("demo", "my-policy", task_sets=["math"])
    experiment.submit(["sum-1", "sum-2"])
    for batch in experiment.batches(groups=2, limit=1):
        with batch:
            train(batch.groups)
"""

from prorl_client._async.batches import AsyncBatch
from prorl_client._async.client import AsyncClient
from prorl_client._async.evaluations import AsyncEvaluation
from prorl_client._async.experiments import AsyncExperiment
from prorl_client._async.policies import AsyncPolicy, AsyncPolicyUpdate
from prorl_client._async.rollouts import AsyncGroup, AsyncRollout
from prorl_client._async.task_imports import AsyncTaskImport
from prorl_client._sync.batches import Batch
from prorl_client._sync.client import Client
from prorl_client._sync.evaluations import Evaluation
from prorl_client._sync.experiments import Experiment
from prorl_client._sync.policies import Policy, PolicyUpdate
from prorl_client._sync.rollouts import Group, Rollout
from prorl_client._sync.task_imports import TaskImport
from prorl_client.errors import (
    AuthError,
    ConfigError,
    Conflict,
    InvalidRequest,
    LeaseExpired,
    MissingExtra,
    NotFound,
    NothingLeft,
    ProblemError,
    ProrlError,
    ServerError,
    ServiceUnreachable,
    UnreadableContent,
    WaitTimedOut,
)
from prorl_client.exports import open_export
from prorl_client.lease import KeepAlive
from prorl_client.records import BatchRecord, ServerRecord, TaskRecord, TaskSetRecord
from prorl_client.retries import RetryPolicy
from prorl_client.sse import Event
from prorl_client.submissions import InlineTask
from prorl_client.trajectories import Segment, Trajectory, Turn, read_jsonl
from prorl_client.version import __version__

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "AsyncEvaluation",
    "AsyncExperiment",
    "AsyncGroup",
    "AsyncPolicy",
    "AsyncPolicyUpdate",
    "AsyncRollout",
    "AsyncTaskImport",
    "AuthError",
    "Batch",
    "BatchRecord",
    "Client",
    "ConfigError",
    "Conflict",
    "Evaluation",
    "Event",
    "Experiment",
    "Group",
    "InlineTask",
    "InvalidRequest",
    "KeepAlive",
    "LeaseExpired",
    "MissingExtra",
    "NotFound",
    "NothingLeft",
    "Policy",
    "PolicyUpdate",
    "ProblemError",
    "ProrlError",
    "RetryPolicy",
    "Rollout",
    "Segment",
    "ServerError",
    "ServerRecord",
    "ServiceUnreachable",
    "TaskImport",
    "TaskRecord",
    "TaskSetRecord",
    "Trajectory",
    "Turn",
    "UnreadableContent",
    "WaitTimedOut",
    "__version__",
    "open_export",
    "read_jsonl",
]
