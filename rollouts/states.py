"""States, outcomes and the transition table of a rollout and its attempts."""

from django.db import models


class RolloutState(models.TextChoices):
    """Where a rollout stands on the assembly line."""

    QUEUED = "queued", "queued"
    INIT = "init", "init"
    RUN = "run", "run"
    EVAL = "eval", "eval"
    DONE = "done", "done"


class Outcome(models.TextChoices):
    """How a finished rollout ended; null until it is done."""

    SCORED = "scored", "scored"
    INFRA_FAILED = "infra_failed", "infra_failed"
    TIMED_OUT = "timed_out", "timed_out"
    CANCELLED = "cancelled", "cancelled"


class StopReason(models.TextChoices):
    """Why the agent stopped."""

    FINISHED = "finished", "finished"
    MAX_TURNS = "max_turns", "max_turns"
    MAX_TOKENS = "max_tokens", "max_tokens"
    CONTEXT_FULL = "context_full", "context_full"
    AGENT_TIMEOUT = "agent_timeout", "agent_timeout"
    MALFORMED_ACTION = "malformed_action", "malformed_action"
    REPETITION = "repetition", "repetition"
    POLICY_LAG = "policy_lag", "policy_lag"
    SANDBOX_LIMIT = "sandbox_limit", "sandbox_limit"


class Event(models.TextChoices):
    """What can happen to a rollout."""

    DISPATCH = "dispatch", "dispatch"
    FINISH_STAGE = "finish_stage", "finish_stage"
    RESTART = "restart", "restart"
    END = "end", "end"


class Stage(models.TextChoices):
    """A stage of the assembly line."""

    INIT = "init", "init"
    RUN = "run", "run"
    EVAL = "eval", "eval"


class AttemptState(models.TextChoices):
    """Life of one try at one stage."""

    QUEUED = "queued", "queued"
    RUNNING = "running", "running"
    FINISHED = "finished", "finished"
    FAILED = "failed", "failed"
    LOST = "lost", "lost"
    CANCELLED = "cancelled", "cancelled"


ACTIVE_ATTEMPT = (AttemptState.QUEUED, AttemptState.RUNNING)
IN_STAGE = (RolloutState.INIT, RolloutState.RUN, RolloutState.EVAL)

TRANSITIONS: dict[tuple[str, str], str] = {
    (RolloutState.QUEUED, Event.DISPATCH): RolloutState.INIT,
    (RolloutState.INIT, Event.FINISH_STAGE): RolloutState.RUN,
    (RolloutState.RUN, Event.FINISH_STAGE): RolloutState.EVAL,
    (RolloutState.EVAL, Event.FINISH_STAGE): RolloutState.DONE,
    (RolloutState.INIT, Event.RESTART): RolloutState.QUEUED,
    (RolloutState.RUN, Event.RESTART): RolloutState.QUEUED,
    (RolloutState.EVAL, Event.RESTART): RolloutState.QUEUED,
    (RolloutState.QUEUED, Event.END): RolloutState.DONE,
    (RolloutState.INIT, Event.END): RolloutState.DONE,
    (RolloutState.RUN, Event.END): RolloutState.DONE,
    (RolloutState.EVAL, Event.END): RolloutState.DONE,
}


def target(state: str, event: str) -> str | None:
    """Return the state that ``event`` leads to from ``state``, or None when it is not allowed."""
    return TRANSITIONS.get((state, event))


def sources(event: str) -> list[str]:
    """Return the states from which ``event`` is allowed."""
    return [state for (state, name) in TRANSITIONS if name == event]


class GroupState(models.TextChoices):
    """Life of a group on its way to a trainer."""

    OPEN = "open", "open"
    READY = "ready", "ready"
    LEASED = "leased", "leased"
    CONSUMED = "consumed", "consumed"
    FILTERED = "filtered", "filtered"
    CANCELLED = "cancelled", "cancelled"


# What a batch may still be made of, in the end.
COMING = (GroupState.OPEN, GroupState.READY)


class BatchState(models.TextChoices):
    """Life of a batch in a trainer's hands."""

    LEASED = "leased", "leased"
    ACKNOWLEDGED = "acknowledged", "acknowledged"
    RETURNED = "returned", "returned"
    EXPIRED = "expired", "expired"
    REWOUND = "rewound", "rewound"


class ExperimentState(models.TextChoices):
    """Whether an experiment's rollouts are started."""

    ACTIVE = "active", "active"
    PAUSED = "paused", "paused"
    STOPPED = "stopped", "stopped"


class Purpose(models.TextChoices):
    """What an experiment's rollouts are for: evaluation goes before training.

    Those of a verification ask no policy, and no trainer sees their experiment.
    """

    TRAINING = "training", "training"
    EVALUATION = "evaluation", "evaluation"
    VERIFICATION = "verification", "verification"


class VerificationState(models.TextChoices):
    """Life of a verification."""

    RUNNING = "running", "running"
    DONE = "done", "done"
    CANCELLED = "cancelled", "cancelled"


class Verdict(models.TextChoices):
    """What a verification found; undecided says nothing about its environment."""

    VERIFIED = "verified", "verified"
    BROKEN = "broken", "broken"
    UNDECIDED = "undecided", "undecided"


class EvaluationSource(models.TextChoices):
    """What an evaluation is part of."""

    ROLLOUT = "rollout", "the rollout itself"
    REEVALUATION = "reevaluation", "a later re-evaluation"


class ReevaluationState(models.TextChoices):
    """Life of a re-evaluation."""

    QUEUED = "queued", "queued"
    RUNNING = "running", "running"
    DONE = "done", "done"
    CANCELLED = "cancelled", "cancelled"


OPEN_REEVALUATION = (ReevaluationState.QUEUED, ReevaluationState.RUNNING)


class Feed(models.TextChoices):
    """Where an experiment's groups come from: the trainer posts them, or its task sets do."""

    PUSH = "push", "push"
    PULL = "pull", "pull"


class ServerState(models.TextChoices):
    """Whether an inference server receives work."""

    ACTIVE = "active", "active"
    DRAINING = "draining", "draining"
    REMOVED = "removed", "removed"


class UpdateMode(models.TextChoices):
    """What a policy's update does with what is generated meanwhile."""

    DRAIN_CALLS = "drain-calls", "drain-calls"
    DRAIN_ROLLOUTS = "drain-rollouts", "drain-rollouts"
    ABORT = "abort", "abort"
    NONE = "none", "none"


class UpdateState(models.TextChoices):
    """Life of a policy's update."""

    QUIESCING = "quiescing", "quiescing"
    READY = "ready", "ready"
    COMPLETED = "completed", "completed"
    ABANDONED = "abandoned", "abandoned"


class LagAction(models.TextChoices):
    """What becomes of a rollout whose tokens would span too many policy versions.

    Cut: it ends there and is scored. Drop: it is cancelled. Keep: it goes on.
    """

    CUT = "cut", "cut"
    DROP = "drop", "drop"
    KEEP = "keep", "keep"


OPEN_UPDATE = (UpdateState.QUIESCING, UpdateState.READY)
# In these modes no request is under way once the update is ready.
HOLDS_CALLS = (UpdateMode.DRAIN_CALLS, UpdateMode.ABORT)


class ImportState(models.TextChoices):
    """Life of an import of tasks."""

    QUEUED = "queued", "queued"
    RUNNING = "running", "running"
    DONE = "done", "done"
    FAILED = "failed", "failed"
    CANCELLED = "cancelled", "cancelled"


class ImportSource(models.TextChoices):
    """Where an import reads from."""

    UPLOAD = "upload", "upload"
    PATH = "path", "path"


IMPORT_ACTIVE = (ImportState.QUEUED, ImportState.RUNNING)
