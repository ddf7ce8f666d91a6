"""Celery tasks: parse the one id, call one service."""

import logging
from typing import Any
from uuid import UUID

from celery import shared_task
from celery.worker import state

from rollouts import queues
from rollouts.services.dispatch import dispatch
from rollouts.services.early_end import cancel_leftovers, end_early
from rollouts.services.event_counts import tell_counts_soon
from rollouts.services.feed import feed_all, feed_experiment
from rollouts.services.image_builds import dispatch_image_builds
from rollouts.services.import_claim import recover_imports
from rollouts.services.policy_alarms import abandon_overdue_updates
from rollouts.services.policy_updates import advance_updates
from rollouts.services.reap import reap, request_sweeps
from rollouts.services.reevaluations import publish_open_reevaluations
from rollouts.services.servers import check_servers
from rollouts.services.verifications import advance_verifications
from rollouts.services.webhook_delivery import deliver_webhooks
from rollouts.stages.database import database
from rollouts.stages.importing import run_import
from sandboxes.services.image_claim import recover_builds
from sandboxes.services.image_work import carry_out_build
from sandboxes.services.node import sweep_node as sweep_this_node

logger = logging.getLogger(__name__)


def _carry_out(attempt_id: str) -> None:
    from rollouts.stages.runner import carry_out

    carry_out(UUID(attempt_id))


@shared_task(name=queues.STAGE_TASK[queues.INIT])
def run_init(attempt_id: str, **_: Any) -> None:
    """Carry out an INIT attempt."""
    _carry_out(attempt_id)


@shared_task(name=queues.STAGE_TASK[queues.RUN])
def run_run(attempt_id: str, **_: Any) -> None:
    """Carry out a RUN attempt."""
    _carry_out(attempt_id)


@shared_task(name=queues.STAGE_TASK[queues.EVAL])
def run_eval(attempt_id: str, **_: Any) -> None:
    """Carry out an EVAL attempt."""
    _carry_out(attempt_id)


@shared_task(name=queues.REEVALUATION_TASK)
def run_reevaluation(reevaluation_id: str, **_: Any) -> None:
    """Score some more of a re-evaluation's rollouts."""
    from rollouts.stages.reevaluating import carry_on

    carry_on(UUID(reevaluation_id))


@shared_task(name=queues.SWEEP_TASK)
def sweep_node(node: str, **_: Any) -> None:
    """Remove what nothing owns from the node that this worker runs on."""
    with database():
        removed = sweep_this_node()
    if removed:
        logger.info("node %s: %d sandboxes removed", node, removed)


@shared_task(name=queues.IMAGE_TASK)
def image_build(build_id: str, **_: Any) -> None:
    """Carry out an image build on the node that this worker runs on."""
    with database():
        carry_out_build(build_id=UUID(build_id), stopping=_is_ending)


def _is_ending() -> bool:
    """Tell whether this worker was told to end: what takes long is given back then."""
    flags = (state.should_stop, state.should_terminate)
    return any(flag is not None and flag is not False for flag in flags)  # 0 is an exit code


@shared_task(name=queues.IMPORT_TASK)
def import_tasks(import_id: str, **_: Any) -> None:
    """Carry out an import of tasks, in a process of its own."""
    run_import(import_id=UUID(import_id), stopping=_is_ending)


@shared_task(name=queues.DISPATCH_TASK)
def control_dispatch(**_: Any) -> None:
    """Start what free slots can start, and image builds."""
    with database():
        started = dispatch()
        dispatch_image_builds()
    if started:
        logger.info("dispatched %d rollouts", started)


@shared_task(name=queues.GROUPS_TASK)
def control_groups(experiment_id: str, **_: Any) -> None:
    """End what can no longer enter an experiment's batch, and what goes on in ended groups.

    The last group of a verification ends that too.
    """
    with database():
        end_early(experiment_id=UUID(experiment_id))
        cancel_leftovers(experiment_id=UUID(experiment_id))
        advance_verifications(experiment_id=UUID(experiment_id))


@shared_task(name=queues.FEED_TASK)
def control_feed(experiment_id: str | None = None, **_: Any) -> None:
    """Feed one experiment that pulls, or all of them."""
    with database():
        if experiment_id is None:
            started = feed_all()
        else:
            started = feed_experiment(experiment_id=UUID(experiment_id))
    if started:
        logger.info("fed %d groups", started)


@shared_task(name="rollouts.tasks.control_reap")
def control_reap(**_: Any) -> None:
    """Put right what dead workers and lost messages leave."""
    with database():
        reaped = reap()
        publish_open_reevaluations()
        recover_builds()
        recover_imports()
        advance_verifications()
    logger.debug("%s", reaped)


@shared_task(name="rollouts.tasks.control_check_servers")
def control_check_servers(**_: Any) -> None:
    """Write down the health of every inference server."""
    with database():
        check_servers()


@shared_task(name=queues.UPDATES_TASK)
def control_policy_updates(**_: Any) -> None:
    """Bring the updates of policies on."""
    with database():
        abandon_overdue_updates()
        advance_updates()


@shared_task(name="rollouts.tasks.control_webhooks")
def control_webhooks(**_: Any) -> None:
    """Send to webhooks what happened."""
    with database():
        tell_counts_soon()
        deliver_webhooks()


@shared_task(name="rollouts.tasks.control_sweep")
def control_sweep(**_: Any) -> None:
    """Ask every node to remove what nothing owns."""
    with database():
        request_sweeps()
