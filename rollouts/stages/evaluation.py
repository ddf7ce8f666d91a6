"""EVAL: score a rollout, and find out whose fault it is when no score comes."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

from evaluators.base import (
    Artefacts,
    EvaluatorCancelled,
    EvaluatorCrashed,
    EvaluatorFault,
    Phase,
    Score,
)
from evaluators.registry import get_evaluator
from evaluators.runner import advance
from rollouts.exceptions import InfraFault, NotThere
from rollouts.models import Rollout
from rollouts.options import Budgets
from rollouts.services.artefacts import rollout_artefacts, store_artefacts, with_phase
from rollouts.services.finish import EvalResult, StoredTrajectory, finish_eval
from rollouts.services.grading_settings import grading_settings, settings_digest
from rollouts.services.secrets import evaluator_secrets, masked, replace_marks
from rollouts.services.trajectories import forget_files, reward_turns
from rollouts.stages.database import database
from rollouts.stages.lease import Held
from rollouts.stages.phases import Bench, Grading
from sandboxes.services.lifecycle import find_sandbox
from sandboxes.states import SandboxPurpose

logger = logging.getLogger(__name__)

MAX_PHASES = 8


def carry_out_eval(held: Held) -> None:
    """Carry out EVAL. Raises LeaseLost, and InfraFault when the grading itself is broken."""
    with database():
        grading = _load(held)
    examined = Examination(held, grading, _artefacts(grading))
    try:
        found = examined.grade()
    except EvaluatorCancelled:
        raise
    except EvaluatorFault as fault:
        found = _whose_fault(held, grading, fault)
    evidence = store_artefacts(
        rollout=grading.rollout, name=held.claim.attempt_id.hex[:8], artefacts=examined.artefacts
    )
    rewarded = _rewarded(held, grading.rollout, found)
    with database():
        finish_eval(
            claim=held.claim,
            result=EvalResult(
                evaluator=grading.evaluator,
                evaluator_version=get_evaluator(grading.evaluator).version,
                settings_digest=settings_digest(grading.settings),
                reward=found.reward,
                rewards=dict(found.rewards),
                turn_rewards=list(found.turn_rewards),
                details=dict(found.details),
                log=found.log,
                evidence=evidence,
                trajectory=rewarded,
            ),
        )
    if rewarded is not None:
        forget_files(grading.rollout.trajectory)


def _rewarded(held: Held, rollout: Rollout, found: Score) -> StoredTrajectory | None:
    """Return the trajectory with the rewards of its turns; None where there are none for it."""
    if all(reward is None for reward in found.turn_rewards) or not hasattr(rollout, "trajectory"):
        return None
    try:
        rewarded = reward_turns(
            rollout=rollout, attempt_id=held.claim.attempt_id, rewards=found.turn_rewards
        )
    except NotThere as lost:
        logger.error("turns of rollout %s stay without rewards: %s", rollout.id, lost)
        return None
    if rewarded is None:
        logger.info("rollout %s has other turns than those that have rewards", rollout.id)
    return rewarded


class Examination:
    """One grading of one rollout; `artefacts` grow with the phases that it carried out."""

    def __init__(
        self, held: Held, grading: Grading, artefacts: Artefacts, *, untouched: bool = False
    ) -> None:
        self.artefacts = artefacts
        self._held = held
        self._grading = grading
        self._untouched = untouched

    def grade(self) -> Score:
        """Carry out the phases that the evaluator asks for, then score.

        Raises EvaluatorFault, InfraFault and the faults of sandboxes.
        """
        bench = Bench(self._held, self._grading, untouched=self._untouched)
        secrets = self._secrets()
        settings = replace_marks(self._grading.settings, secrets)
        with closing(bench), _hidden(secrets):
            while True:
                wanted = advance(
                    self._grading.evaluator,
                    settings,
                    self._grading.payload,
                    self.artefacts,
                    timeout_seconds=bench.scoring_seconds(),
                    cancelled=self._held.stopping,
                )
                if isinstance(wanted, Score):
                    return replace(
                        wanted,
                        details=masked(wanted.details, secrets),
                        log=masked(wanted.log, secrets),
                    )
                self._carry_out(bench, wanted)

    def _secrets(self) -> dict[str, str]:
        grading = self._grading
        with database():
            return evaluator_secrets(
                grading.settings, environment=grading.environment, task=grading.rollout.group.task
            )

    def _carry_out(self, bench: Bench, phase: Phase) -> None:
        if self.artefacts.phase(phase.name) is not None:
            raise EvaluatorCrashed(f"the evaluator asked for the phase {phase.name!r} twice")
        if len(self.artefacts.phases) == MAX_PHASES:
            raise EvaluatorCrashed(f"the evaluator asked for more than {MAX_PHASES} sandboxes")
        if not self._grading.rollout.needs_sandbox:
            raise InfraFault(
                f"Evaluator {self._grading.evaluator} wants a sandbox and environment "
                f"{self._grading.environment.ref} has none: give it an image or another evaluator.",
                code="evaluator.no_sandbox",
                retryable=False,
            )
        left = bench.run(phase)
        self.artefacts = with_phase(self.artefacts, left)


@contextmanager
def _hidden(secrets: Mapping[str, str]) -> Iterator[None]:
    """Take the values of secrets out of what a fault says."""
    try:
        yield
    except EvaluatorFault as fault:
        fault.args = (masked(str(fault), secrets),)
        fault.log = masked(fault.log, secrets)
        raise


def _load(held: Held) -> Grading:
    rollout = Rollout.objects.select_related(
        "environment__image", "group__task", "group__snapshot", "experiment", "trajectory"
    ).get(pk=held.claim.rollout_id)
    task = rollout.group.task
    evaluator, settings, payload = grading_settings(environment=rollout.environment, task=task)
    return Grading(
        rollout=rollout,
        environment=rollout.environment,
        evaluator=evaluator,
        settings=settings,
        payload=payload,
        tests=task.hidden.get("tests", {}),
        test_seconds=float(task.payload.get("verifier_timeout_seconds") or 600.0),
        grading_seconds=Budgets.stored(rollout.experiment.budgets).eval_seconds,
        frozen=find_sandbox(owner=rollout.id, purpose=SandboxPurpose.RUN),
        sandbox=find_sandbox(owner=rollout.id, purpose=SandboxPurpose.GRADE),
    )


def _artefacts(grading: Grading) -> Artefacts:
    """Return what the rollout left for its evaluator. Raises InfraFault."""
    wanted = get_evaluator(grading.evaluator).wants_messages(grading.settings)
    try:
        return rollout_artefacts(rollout=grading.rollout, with_messages=wanted)
    except NotThere as lost:
        raise InfraFault(str(lost), code=lost.code) from lost


def _whose_fault(held: Held, grading: Grading, fault: EvaluatorFault) -> Score:
    """Grade the untouched layer: when that works, the policy broke its grading and pays for it."""
    if held.stopping():
        raise fault
    if fault.is_graders:
        raise InfraFault(str(fault), code=fault.code) from fault
    nothing = Artefacts(instruction=grading.rollout.group.task.instruction)
    try:
        Examination(held, grading, nothing, untouched=True).grade()
    except EvaluatorFault as own:
        raise InfraFault(
            f"The evaluator fails on the untouched sandbox too: {own} (first: {fault})",
            code=own.code,
        ) from fault
    reward = grading.rollout.experiment.failure_reward
    logger.info("rollout %s broke its own grading: %s", grading.rollout.id, fault.code)
    return Score(
        reward=reward,
        rewards={"reward": reward},
        details={"policy_fault": fault.code, "message": str(fault)[:2000]},
        log=fault.log,
    )
