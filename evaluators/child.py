"""Score one request read from standard input and write the outcome to standard output.

Run as `python -m evaluators.child` by `evaluators.runner`, which kills it when its time is up.
Should the runner itself be killed, an alarm left at its default action, which ends the process
even inside a regular expression, does the same.
"""

from __future__ import annotations

import resource
import signal
import sys

from evaluators.base import EvaluatorFault, Score
from evaluators.registry import get_evaluator
from evaluators.wire import pack_outcome, unpack_request

MEMORY_BYTES = 2 * 1024**3


def main() -> None:
    """Score the request; a fault is an outcome too."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    name, settings, payload, artefacts, backstop = unpack_request(sys.stdin.buffer.read())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, backstop)
    outcome: Score | EvaluatorFault
    try:
        evaluator = get_evaluator(name)
        evaluator.validate(settings, payload)
        outcome = evaluator.score(settings, payload, artefacts)
    except EvaluatorFault as fault:
        outcome = fault
    sys.stdout.buffer.write(pack_outcome(outcome))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
