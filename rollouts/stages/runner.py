"""The stage boundary: claim, work, and one of finish, fail, cancel or give back."""

import logging
from collections.abc import Callable
from uuid import UUID

from django.db import Error as DatabaseError

from evaluators.base import EvaluatorCancelled, EvaluatorFault
from rollouts.exceptions import AttemptCancelled, InfraFault, LeaseLost
from rollouts.handlers.base import AgentCancelled, AgentFault, CommandInterrupted
from rollouts.inference.exceptions import GenerationCancelled, InferenceFault
from rollouts.services.claim import claim_attempt
from rollouts.services.finish import fail_attempt, finish_cancelled, give_back
from rollouts.stages import process
from rollouts.stages.database import database
from rollouts.stages.evaluation import carry_out_eval
from rollouts.stages.initialisation import carry_out_init
from rollouts.stages.lease import Held
from rollouts.stages.running import carry_out_run
from rollouts.states import Stage
from sandboxes.runtime.exceptions import (
    ImageMissing,
    SandboxCancelled,
    SandboxFault,
    SandboxGone,
    SetupFailed,
    StartTimeout,
)
from sandboxes.services.node import remove_given_up

logger = logging.getLogger(__name__)

STAGES: dict[str, Callable[[Held], None]] = {
    Stage.INIT: carry_out_init,
    Stage.RUN: carry_out_run,
    Stage.EVAL: carry_out_eval,
}

_STOPPED = (
    AttemptCancelled,
    AgentCancelled,
    EvaluatorCancelled,
    GenerationCancelled,
    SandboxCancelled,
)


def carry_out(attempt_id: UUID) -> None:
    """Carry out one attempt, if it is still to be had; never raises what a stage did wrong."""
    lease = process.lease()
    with database():
        claim = claim_attempt(attempt_id=attempt_id, worker=lease.registration())
    if claim is None:
        logger.debug("attempt %s is not to be had", attempt_id)
        return
    with lease.hold(claim) as held:
        try:
            STAGES[claim.stage](held)
        except LeaseLost as lost:
            logger.warning("attempt %s: %s", attempt_id, lost)
        except Exception as error:
            with database():
                _settle(held, error)
    with database():
        remove_given_up(owner=claim.rollout_id)


def _settle(held: Held, error: Exception) -> None:
    """Write what an exception of a stage means; the one broad catch ends here."""
    claim = held.claim
    try:
        if held.stopping() or isinstance(error, _STOPPED):
            if held.cause == "cancelled":
                finish_cancelled(claim=claim)
            elif held.cause == "shutdown":
                give_back(claim=claim)
            else:
                logger.warning("attempt %s is held no longer", claim.attempt_id)
            return
        fault = as_fault(error, stage=claim.stage)
        logger.warning("attempt %s failed: %s: %s", claim.attempt_id, fault.code, fault)
        fail_attempt(
            claim=claim,
            code=fault.code,
            detail=str(fault),
            retryable=fault.retryable,
            restart_from_init=fault.restart_from_init,
            timed_out=fault.timed_out,
        )
    except LeaseLost as lost:
        logger.warning("attempt %s: %s", claim.attempt_id, lost)
    except DatabaseError:
        logger.exception("attempt %s: its end could not be written", claim.attempt_id)


def as_fault(error: Exception, *, stage: str) -> InfraFault:
    """Return an exception of any layer as a fault of the service."""
    match error:
        case InfraFault():
            return error
        case SandboxGone():
            return InfraFault(str(error), code=error.code, restart_from_init=True)
        case ImageMissing():
            return InfraFault(str(error), code=error.code, retryable=False)
        case SetupFailed():
            return InfraFault(str(error), code=error.code, timed_out=error.timed_out)
        case StartTimeout():
            return InfraFault(str(error), code=error.code, timed_out=True)
        case CommandInterrupted():
            return InfraFault(str(error), code=error.code, restart_from_init=True)
        case InferenceFault():
            return InfraFault(str(error), code=error.code, timed_out=False)
        case SandboxFault() | EvaluatorFault():
            return InfraFault(str(error), code=error.code)
        case AgentFault():
            return InfraFault(str(error), code=error.code, retryable=False)
    logger.error("unexpected error in %s", stage, exc_info=error)
    return InfraFault(f"{type(error).__name__}: {error}", code=f"{stage}.crashed")
