"""What an evaluator was given, kept beside the trajectory so that it can be judged again.

The messages are in the trajectory and are not written twice.
"""

import gzip
import hashlib
import json
from dataclasses import replace

from django.core.files.base import ContentFile

from evaluators.base import Artefacts, PhaseResult, Ran
from evaluators.wire import pack_artefacts, unpack_artefacts
from rollouts.exceptions import NotThere
from rollouts.models import Evaluation, Rollout
from rollouts.services.finish import StoredEvidence
from rollouts.services.trajectories import read_body
from rollouts.storage import trajectory_storage

FORMAT = 1
OUTPUT_BYTES = 16 * 1024 * 1024


def rollout_artefacts(*, rollout: Rollout, with_messages: bool) -> Artefacts:
    """Return what a rollout left for its evaluator, no phase carried out yet.

    `rollout` comes with its trajectory, group and task selected. Raises NotThere when the messages
    are asked for and the trajectory's file is missing or damaged.
    """
    messages = []
    if with_messages:
        stored = getattr(rollout, "trajectory", None)
        if stored is None:
            raise NotThere("The rollout has no trajectory.", code="trajectory.none")
        messages = json.loads(read_body(stored))["messages"]
    return Artefacts(
        answer=rollout.answer,
        last_message=rollout.last_message,
        messages=tuple(messages),
        turns=rollout.turns,
        tokens=rollout.sampled_tokens,
        stop_reason=rollout.stop_reason or "",
        instruction=rollout.group.task.instruction,
    )


def with_phase(artefacts: Artefacts, left: PhaseResult) -> Artefacts:
    """Return artefacts with what one more phase left."""
    return replace(artefacts, phases=(*artefacts.phases, left))


def store_artefacts(*, rollout: Rollout, name: str, artefacts: Artefacts) -> StoredEvidence:
    """Write artefacts to the store; `name` is unique by attempt, so no try overwrites another's.

    Of what commands printed at most `OUTPUT_BYTES` are kept, the end of each stream.
    """
    kept = replace(artefacts, messages=(), phases=_bounded(artefacts.phases))
    cut = kept.phases != artefacts.phases
    body = {"format": FORMAT, "cut": cut, "artefacts": pack_artefacts(kept)}
    packed = gzip.compress(json.dumps(body).encode(), mtime=0)
    folder = f"{rollout.experiment_id}/{rollout.pk.hex[:2]}"
    path = trajectory_storage().save(
        f"{folder}/{rollout.pk}.{name}.evidence.json.gz", ContentFile(packed)
    )
    return StoredEvidence(
        path=path, size_bytes=len(packed), sha256=hashlib.sha256(packed).hexdigest()
    )


def _bounded(phases: tuple[PhaseResult, ...]) -> tuple[PhaseResult, ...]:
    ran = [each for phase in phases for each in phase.commands]
    if sum(len(each.stdout) + len(each.stderr) for each in ran) <= OUTPUT_BYTES:
        return phases
    share = OUTPUT_BYTES // (2 * len(ran))
    return tuple(
        replace(phase, commands=tuple(_end_of(each, share) for each in phase.commands))
        for phase in phases
    )


def _end_of(ran: Ran, size: int) -> Ran:
    if max(len(ran.stdout), len(ran.stderr)) <= size:
        return ran
    return replace(ran, stdout=ran.stdout[-size:], stderr=ran.stderr[-size:], truncated=True)


def read_evidence(*, evaluation: Evaluation) -> bytes:
    """Return the stored file, gzip-compressed JSON, checked.

    Raises NotThere when nothing was kept, or the file is missing or damaged.
    """
    path = evaluation.evidence_path
    if not path:
        raise NotThere("Nothing was kept of this evaluation.", code="evidence.none")
    try:
        with trajectory_storage().open(path, "rb") as stream:
            packed: bytes = stream.read()
    except OSError:
        raise NotThere(
            f"The evidence's file {path} is missing from the store.", code="evidence.missing"
        ) from None
    if hashlib.sha256(packed).hexdigest() != evaluation.evidence_sha256:
        raise NotThere(f"The evidence's file {path} is damaged.", code="evidence.damaged")
    return packed


def read_phases(*, evaluation: Evaluation) -> tuple[PhaseResult, ...]:
    """Return what the phases of an evaluation left. Raises NotThere as `read_evidence` does."""
    try:
        body = json.loads(gzip.decompress(read_evidence(evaluation=evaluation)))
        phases = unpack_artefacts(body["artefacts"]).phases
        cut = body.get("cut", False)
    except (ValueError, KeyError, TypeError, EOFError) as fault:
        raise NotThere(
            f"The evidence's file {evaluation.evidence_path} cannot be read: {fault}",
            code="evidence.unreadable",
        ) from None
    if cut:
        raise NotThere(
            f"What was printed was too much to be kept whole (more than {OUTPUT_BYTES} bytes): "
            "what is left of it cannot be scored again.",
            code="evidence.cut",
        )
    return phases
