"""Answer one request read from standard input on standard output.

Run as `python -m evaluators.child` by `evaluators.runner`, which kills it when its time is up.
Should the runner itself be killed, an alarm left at its default action, which ends the process
even inside a regular expression, does the same.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from evaluators.base import Artefacts, Evaluator, EvaluatorFault, JsonMap
from evaluators.registry import get_evaluator
from evaluators.surroundings import take_environment
from evaluators.wire import Kind, Outcome, pack_outcome, unpack_request

MEMORY_BYTES = 2 * 1024**3


def main() -> None:
    """Answer the request; a fault is an outcome too."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, name, settings, payload, artefacts, backstop = unpack_request(sys.stdin.buffer.read())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, backstop)
    # What an evaluator or its library prints is no answer.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    take_environment(os.environ)
    try:
        outcome = _carry_out(kind, get_evaluator(name), settings, payload, artefacts)
    except EvaluatorFault as fault:
        outcome = fault
    answer.write(pack_outcome(outcome))
    answer.close()


def _carry_out(
    kind: Kind, evaluator: Evaluator, settings: JsonMap, payload: JsonMap, artefacts: Artefacts
) -> Outcome:
    """Return the next phase where one is asked for and wanted, else the score."""
    evaluator.validate(settings, payload)
    if kind == "advance":
        phase = evaluator.next_phase(settings, payload, artefacts)
        if phase is not None:
            return phase
    return evaluator.score(settings, payload, artefacts)


if __name__ == "__main__":
    main()
