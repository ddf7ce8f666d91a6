"""Names of queues and tasks: one place, so that a typo is an error."""

from typing import Final

from kombu import Exchange, Queue

INIT: Final = "init"
RUN: Final = "run"
EVAL: Final = "eval"
CONTROL: Final = "control"

STAGE_QUEUES: Final = (INIT, RUN, EVAL, CONTROL)
NODE_STAGES: Final = (INIT, RUN, EVAL)
POOL_OF_QUEUE: Final = {INIT: "threads", RUN: "threads", EVAL: "prefork", CONTROL: "threads"}

STAGE_TASK: Final = {
    INIT: "rollouts.tasks.run_init",
    RUN: "rollouts.tasks.run_run",
    EVAL: "rollouts.tasks.run_eval",
}
IMPORT_TASK: Final = "rollouts.tasks.import_tasks"
REEVALUATION_TASK: Final = "rollouts.tasks.run_reevaluation"
SWEEP_TASK: Final = "rollouts.tasks.sweep_node"
IMAGE_TASK: Final = "rollouts.tasks.image_build"
DISPATCH_TASK: Final = "rollouts.tasks.control_dispatch"
UPDATES_TASK: Final = "rollouts.tasks.control_policy_updates"
FEED_TASK: Final = "rollouts.tasks.control_feed"
GROUPS_TASK: Final = "rollouts.tasks.control_groups"


def named_queue(name: str) -> Queue:
    """Return a queue with an exchange of its own.

    Without one, every queue would be bound to Celery's default exchange and key, and each message
    would reach all of them.
    """
    return Queue(name, Exchange(name, type="direct"), routing_key=name)


def stage_queue(stage: str, node: str | None) -> Queue:
    """Return the queue of a stage: the node's own one, or the shared one where any node will do."""
    return named_queue(stage if node is None else f"{stage}.{node}")
