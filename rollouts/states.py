"""States, outcomes and the transition table of a rollout and its attempts."""

from django.db import models


class RolloutState(models.TextChoices):
    """Where a rollout stands on the assembly line."""

    QUEUED = "queued"
    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    DONE = "done"


class Outcome(models.TextChoices):
    """How a finished rollout ended; null until it is done."""

    SCORED = "scored"
    INFRA_FAILED = "infra_failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class StopReason(models.TextChoices):
    """Why the agent stopped."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    AGENT_TIMEOUT = "agent_timeout"
    MALFORMED_ACTION = "malformed_action"
    REPETITION = "repetition"


class Event(models.TextChoices):
    """What can happen to a rollout."""

    DISPATCH = "dispatch"
    FINISH_STAGE = "finish_stage"
    RESTART = "restart"
    END = "end"


class Stage(models.TextChoices):
    """A stage of the assembly line."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class AttemptState(models.TextChoices):
    """Life of one try at one stage."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


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

    OPEN = "open"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    CANCELLED = "cancelled"


class BatchState(models.TextChoices):
    """Life of a batch in a trainer's hands."""

    LEASED = "leased"
    ACKNOWLEDGED = "acknowledged"
    RETURNED = "returned"
    EXPIRED = "expired"


class ExperimentState(models.TextChoices):
    """Whether an experiment's rollouts are started."""

    ACTIVE = "active"
    PAUSED = "paused"
    STOPPED = "stopped"


class ServerState(models.TextChoices):
    """Whether an inference server receives work."""

    ACTIVE = "active"
    DRAINING = "draining"
    REMOVED = "removed"
