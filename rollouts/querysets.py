"""Queries on the assembly line."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from rollouts.states import (
    COMING,
    IMPORT_ACTIVE,
    OPEN_REEVALUATION,
    OPEN_UPDATE,
    AttemptState,
    BatchState,
    GroupState,
    ImportState,
    Outcome,
    Purpose,
    RolloutState,
    ServerState,
)

if TYPE_CHECKING:
    from rollouts.models import (  # noqa: F401
        Attempt,
        Batch,
        Evaluation,
        EvaluationRun,
        Experiment,
        Group,
        InferenceServer,
        Policy,
        PolicyUpdate,
        Reevaluation,
        Rollout,
        Task,
        TaskImport,
        Webhook,
        Worker,
    )


def _visible(user: Any, token: Any, prefix: str) -> Q:
    """Return the condition for what a caller may see; staff see everything."""
    allowed = Q() if user.is_staff else Q(**{f"{prefix}owner": user})
    if token is None:
        return allowed
    if not token.is_bound:
        return allowed
    bound = list(token.experiments.values_list("pk", flat=True))
    return allowed & Q(**{f"{prefix}pk__in": bound})


class ExperimentQuerySet(models.QuerySet["Experiment"]):
    """Adjectives of experiments."""

    def visible_to(self, user: Any, token: Any = None) -> "ExperimentQuerySet":
        """Keep what the caller may see."""
        shown = self.exclude(purpose=Purpose.VERIFICATION)
        return shown.filter(_visible(user, token, ""))


class TaskQuerySet(models.QuerySet["Task"]):
    """Adjectives of tasks."""

    def flaky(self) -> "TaskQuerySet":
        """Keep those whose present content scored differently when it was repeated."""
        return self.exclude(flaky_hash="").filter(flaky_hash=F("content_hash"))

    def steady(self) -> "TaskQuerySet":
        """Keep the others."""
        return self.filter(Q(flaky_hash="") | ~Q(flaky_hash=F("content_hash")))


class GroupQuerySet(models.QuerySet["Group"]):
    """Adjectives of groups."""

    def visible_to(self, user: Any, token: Any = None) -> "GroupQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))

    def coming(self) -> "GroupQuerySet":
        """Keep what a batch may still be made of, in start order; an index holds only these."""
        return self.filter(state__in=COMING).order_by("-priority", "sequence")

    def leasable(self) -> "GroupQuerySet":
        """Keep finished groups that no batch holds, in start order."""
        return self.filter(state=GroupState.READY).order_by("-priority", "sequence")


class RolloutQuerySet(models.QuerySet["Rollout"]):
    """Adjectives of rollouts."""

    def visible_to(self, user: Any, token: Any = None) -> "RolloutQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))

    def unfinished(self) -> "RolloutQuerySet":
        """Keep what is not done."""
        return self.exclude(state=RolloutState.DONE)

    def scored(self) -> "RolloutQuerySet":
        """Keep what has a reward."""
        return self.filter(outcome=Outcome.SCORED)


class EvaluationQuerySet(models.QuerySet["Evaluation"]):
    """Adjectives of scorings."""

    def visible_to(self, user: Any, token: Any = None) -> "EvaluationQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "rollout__experiment__"))


class ReevaluationQuerySet(models.QuerySet["Reevaluation"]):
    """Adjectives of re-evaluations."""

    def visible_to(self, user: Any, token: Any = None) -> "ReevaluationQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))

    def open(self) -> "ReevaluationQuerySet":
        """Keep what is not over."""
        return self.filter(state__in=OPEN_REEVALUATION)

    def unheld(self) -> "ReevaluationQuerySet":
        """Keep what is not over and in no worker's hands, by the database's clock."""
        free = Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=Now())
        return self.open().filter(free)


class AttemptQuerySet(models.QuerySet["Attempt"]):
    """Adjectives of attempts."""

    def running(self) -> "AttemptQuerySet":
        """Keep what a worker holds."""
        return self.filter(state=AttemptState.RUNNING)

    def queued(self) -> "AttemptQuerySet":
        """Keep what waits for a worker."""
        return self.filter(state=AttemptState.QUEUED)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """Adjectives of worker processes."""

    def live(self) -> "WorkerQuerySet":
        """Keep processes whose lease holds, by the database's clock: nodes' clocks differ."""
        return self.filter(ended_at__isnull=True, lease_expires_at__gt=Now())

    def lapsed(self) -> "WorkerQuerySet":
        """Keep processes that stopped renewing and were not yet buried."""
        return self.filter(ended_at__isnull=True, lease_expires_at__lte=Now())


class BatchQuerySet(models.QuerySet["Batch"]):
    """Adjectives of batches."""

    def visible_to(self, user: Any, token: Any = None) -> "BatchQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))

    def held(self) -> "BatchQuerySet":
        """Keep leases that hold, by the database's clock: web processes' clocks differ."""
        return self.filter(state=BatchState.LEASED, lease_expires_at__gt=Now())

    def expired(self) -> "BatchQuerySet":
        """Keep leases that ran out and were not yet taken back, by the database's clock."""
        return self.filter(state=BatchState.LEASED, lease_expires_at__lte=Now())


class PolicyQuerySet(models.QuerySet["Policy"]):
    """Adjectives of policies."""

    def visible_to(self, user: Any, token: Any = None) -> "PolicyQuerySet":
        """Keep what the caller may see and change: its own, and those of nobody."""
        del token  # policies are shared between experiments
        return self if user.is_staff else self.filter(Q(owner=user) | Q(owner__isnull=True))


class PolicyUpdateQuerySet(models.QuerySet["PolicyUpdate"]):
    """Adjectives of policies' updates."""

    def visible_to(self, user: Any, token: Any = None) -> "PolicyUpdateQuerySet":
        """Keep what the caller may see and change: the updates of such policies."""
        del token
        mine = Q(policy__owner=user) | Q(policy__owner__isnull=True)
        return self if user.is_staff else self.filter(mine)

    def open(self) -> "PolicyUpdateQuerySet":
        """Keep what was neither completed nor abandoned."""
        return self.filter(state__in=OPEN_UPDATE)

    def unreleased(self) -> "PolicyUpdateQuerySet":
        """Keep what still holds generation back, or whose end has not reached it yet."""
        return self.filter(released_at__isnull=True)


class InferenceServerQuerySet(models.QuerySet["InferenceServer"]):
    """Adjectives of inference servers."""

    def visible_to(self, user: Any, token: Any = None) -> "InferenceServerQuerySet":
        """Keep what the caller may see and change: the servers of such policies."""
        del token
        mine = Q(policy__owner=user) | Q(policy__owner__isnull=True)
        return self if user.is_staff else self.filter(mine)

    def registered(self) -> "InferenceServerQuerySet":
        """Keep what was not removed."""
        return self.exclude(state=ServerState.REMOVED)

    def routable(self) -> "InferenceServerQuerySet":
        """Keep what may receive new work."""
        return self.filter(state=ServerState.ACTIVE)


class EvaluationRunQuerySet(models.QuerySet["EvaluationRun"]):
    """Adjectives of evaluation runs."""

    def visible_to(self, user: Any, token: Any = None) -> "EvaluationRunQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))


class WebhookQuerySet(models.QuerySet["Webhook"]):
    """Adjectives of webhooks."""

    def visible_to(self, user: Any, token: Any = None) -> "WebhookQuerySet":
        """Keep what the caller may see."""
        return self.filter(_visible(user, token, "experiment__"))


class TaskImportQuerySet(models.QuerySet["TaskImport"]):
    """Adjectives of imports."""

    def active(self) -> "TaskImportQuerySet":
        """Keep what is queued or running."""
        return self.filter(state__in=IMPORT_ACTIVE)

    def silent(self, seconds: float) -> "TaskImportQuerySet":
        """Keep what runs by its row and has not been heard of, by the database's clock."""
        limit = Now() - timedelta(seconds=seconds)
        return self.filter(state=ImportState.RUNNING, heartbeat_at__lt=limit)

    def waiting(self, seconds: float) -> "TaskImportQuerySet":
        """Keep what is queued and was last published longer ago, by the database's clock."""
        limit = Now() - timedelta(seconds=seconds)
        late = Q(published_at__isnull=True) | Q(published_at__lt=limit)
        return self.filter(late, state=ImportState.QUEUED)
