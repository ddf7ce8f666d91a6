"""What the sandbox of a test script left, by hand."""

from collections.abc import Mapping
from types import MappingProxyType

from evaluators.base import Artefacts, PhaseResult, Ran
from evaluators.script import LOG, PHASE, REWARD_JSON, REWARD_TXT


def script_left(
    reward_json: bytes | None = None,
    reward_txt: bytes | None = None,
    *,
    log: bytes = b"ran",
    exit_code: int = 1,
    files: Mapping[str, bytes | None] = MappingProxyType({}),
) -> PhaseResult:
    """Return what a script left that ended by itself."""
    ran = Ran(exit_code=exit_code, stdout=b"", stderr=b"", seconds=0.5)
    found = {REWARD_JSON: reward_json, REWARD_TXT: reward_txt, LOG: log, **files}
    return PhaseResult(name=PHASE, commands=(ran,), files=found)


def script_artefacts(
    reward_json: bytes | None = None, reward_txt: bytes | None = None, *, log: bytes = b"ran"
) -> Artefacts:
    """Return the artefacts of such a script."""
    return Artefacts(phases=(script_left(reward_json, reward_txt, log=log),))
